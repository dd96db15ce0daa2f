from __future__ import annotations

import pytest

from relax_pipeline.config import OptimizerConfig
from relax_pipeline.trainer.schedule import learning_rate


def rates(config: OptimizerConfig, *, total: int, updates: int) -> list[float]:
    return [learning_rate(update, total_updates=total, config=config) for update in range(updates)]


def test_constant_from_the_first_step() -> None:
    assert rates(OptimizerConfig(learning_rate=8.0), total=3, updates=5) == [8.0] * 5


def test_warm_up_is_linear_and_its_first_step_trains() -> None:
    config = OptimizerConfig(learning_rate=8.0, warmup_steps=4)
    assert rates(config, total=6, updates=6) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_cosine_falls_to_a_tenth_and_stays() -> None:
    config = OptimizerConfig(learning_rate=10.0, schedule="cosine")
    # Halfway down between 10 and 1 is 5.5; a quarter of the way is 1 + 9 * (1 + cos 45°) / 2.
    expected = [10.0, 1 + 9 * (1 + 0.5**0.5) / 2, 5.5, 1 + 9 * (1 - 0.5**0.5) / 2, 1.0, 1.0]
    assert rates(config, total=4, updates=6) == pytest.approx(expected, abs=1e-12)


def test_cosine_starts_after_the_warm_up() -> None:
    config = OptimizerConfig(learning_rate=10.0, schedule="cosine", warmup_steps=2)
    assert rates(config, total=4, updates=5) == pytest.approx([5.0, 10.0, 10.0, 5.5, 1.0], abs=1e-12)


def test_warm_up_longer_than_the_run_never_reaches_the_peak() -> None:
    config = OptimizerConfig(learning_rate=8.0, schedule="cosine", warmup_steps=8)
    assert rates(config, total=2, updates=2) == [1.0, 2.0]
