"""The learning rate as a function of the step, so that nothing of it needs saving."""

from __future__ import annotations

import math

from relax_pipeline.config import OptimizerConfig


def learning_rate(update: int, *, total_updates: int, config: OptimizerConfig) -> float:
    """Return the learning rate of one optimizer step.

    Args:
        update: Optimizer steps taken before this one.
        total_updates: Optimizer steps of the whole run; cosine reaches a tenth of the peak there and stays.
        config: Peak rate, schedule, and warm-up (linear; the first of n warm-up steps has 1/n of the peak).
    """
    if update < config.warmup_steps:
        return config.learning_rate * (update + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    span = max(1, total_updates - config.warmup_steps)
    progress = min(1.0, (update - config.warmup_steps) / span)
    return config.learning_rate * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)
