"""One training step: from a scored rollout to optimizer steps and metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from relax_pipeline.config import RunConfig
from relax_pipeline.config.model import MEGATRON_TO_HF_MODULES
from relax_pipeline.errors import ConfigError, TrainerError
from relax_pipeline.lora.gates import GATES
from relax_pipeline.rewards.overlong import overlong_penalty
from relax_pipeline.rl.groups import Rollout, RolloutGroup, make_samples, split_updates
from relax_pipeline.timing import timed
from relax_pipeline.trainer.base import Trainer
from relax_pipeline.types import TrainingSample


def learn(trainer: Trainer, rollout: Rollout, config: RunConfig) -> dict[str, float]:
    """Take the optimizer steps of one rollout and return the mean of their metrics.

    A rollout without a group to learn from takes none: the policy version stays, and `train/updates` is 0.

    Raises:
        TrainerError: A sample is older than rollout.staleness allows, or the trainer failed.
        ConfigError: As `refuse_unreached`.
    """
    groups = make_samples(
        rollout,
        [_shaped_rewards(group, config) for group in rollout.groups],
        advantage=config.algorithm.advantage,
        filter_overlong=config.rewards.overlong.mode == "filter",
    )
    groups = [group for group in groups if any(sample.loss_mask.any() for sample in group)]
    if not groups:
        return {"train/updates": 0.0}
    metrics = staleness(groups, trainer.policy_version(), config)
    updates = split_updates(groups, config.algorithm.updates_per_rollout)
    if len(updates) > 1:
        updates = [_with_policy_logprobs(trainer, samples, config.rollout.temperature) for samples in updates]
    steps: list[dict[str, float]] = []
    seconds: dict[str, float] = {}
    for samples in updates:
        with timed(seconds, "forward_backward"):
            step = trainer.forward_backward(samples, temperature=config.rollout.temperature)
        with timed(seconds, "optimizer"):
            steps.append(step | trainer.optim_step())
    metrics |= {f"train/{name}": value for name, value in _mean(steps).items()}
    metrics |= {f"train/{phase}_seconds": value for phase, value in seconds.items()}
    norms = trainer.adapter_norms()
    if any(step["grad_norm"] > 0 for step in steps):  # the learning rate is never 0, warm-up or not
        refuse_unreached(norms, config)
    metrics |= {f"adapter_norm/{kind}": norm for kind, norm in norms.items()}
    return metrics | {"train/updates": float(len(updates))}


def staleness(groups: Iterable[Sequence[TrainingSample]], policy_version: int, config: RunConfig) -> dict[str, float]:
    """Return how many versions the samples are behind the trainer.

    Raises:
        TrainerError: One is further behind than was asked for.
    """
    behind = np.array([policy_version - sample.policy_version for group in groups for sample in group])
    limit = config.rollout.staleness * config.algorithm.updates_per_rollout
    if behind.max() > limit or behind.min() < 0:
        raise TrainerError(
            f"the rollout holds samples {behind.min()} to {behind.max()} versions behind policy version "
            f"{policy_version}; rollout.staleness allows 0 to {limit}"
        )
    return {"staleness/mean": float(behind.mean()), "staleness/max": float(behind.max())}


def refuse_unreached(norms: Mapping[str, float], config: RunConfig) -> None:
    """Refuse targets that no gradient reaches, once an optimizer step has moved the others.

    Args:
        norms: `Trainer.adapter_norms`. Each is over all layers and experts, since one expert may just have had no
            token; 0 where every lora_B is still the zero it began as.
        config: Of the run. In adapter mode the gates of gated delta nets are held at zero on purpose.

    Raises:
        ConfigError: Names them.
    """
    held = GATES if config.sync.mode == "adapter" else ()
    unreached = sorted(kind for kind, norm in norms.items() if norm == 0 and kind not in held)
    if unreached:
        targets = config.lora.target_modules
        meant = [name for name in targets if not set(unreached).isdisjoint(MEGATRON_TO_HF_MODULES[name])]
        raise ConfigError(
            f"lora.target_modules: no gradient reaches {', '.join(unreached)} (of {', '.join(meant)}): after an "
            "optimizer step every lora_B there is still zero, so these adapters would never train; remove them from "
            "lora.target_modules, or set lora.scope to the part of the model that is trained"
        )


def check_learned(policy_version: int, config: RunConfig) -> None:
    """Refuse to call a run finished that never learned.

    Raises:
        TrainerError: No optimizer step was taken in the whole run.
    """
    if policy_version == 0:
        raise TrainerError(
            f"no rollout of {config.steps} steps had a group to learn from: every completion of a prompt got the same "
            "reward; check rewards.scorers and labels, use easier prompts, or more rollout.completions_per_prompt"
        )


def rollout_metrics(rollout: Rollout) -> dict[str, float]:
    """Return what the policy did on all prompts it was given, dropped groups included, and how fast."""
    groups = rollout.drawn
    rewards = np.concatenate([group.rewards for group in groups])
    lengths = np.array([len(c.token_ids) for group in groups for c in group.completions])
    cut = [c.finish_reason == "length" for group in groups for c in group.completions]
    scores = [score for group in groups for score in group.scores]
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/timed_out": float(sum(score.timed_out for score in scores)),
        "rollout/zero_variance_share": len(rollout.dropped) / len(groups),
        "rollout/completions": float(len(rewards)),
        "rollout/tokens": float(lengths.sum()),
        "rollout/tokens_per_second": float(lengths.sum()) / max(rollout.seconds["generate"], 1e-9),
        "rollout/length_mean": float(lengths.mean()),
        "rollout/cut_share": float(np.mean(cut)),
        "rollout/versions": float(len({c.policy_version for group in groups for c in group.completions})),
    }
    metrics |= {f"seconds/{phase}": value for phase, value in rollout.seconds.items()}
    return metrics | {f"reward/{name}": value for name, value in _mean([s.metrics for s in scores]).items()}


def _shaped_rewards(group: RolloutGroup, config: RunConfig) -> NDArray[np.float64]:
    """Return the group's rewards, with the length penalty where it is on."""
    overlong = config.rewards.overlong
    if overlong.mode != "penalty":
        return group.rewards
    penalties = [
        overlong_penalty(
            len(completion.token_ids),
            max_new_tokens=config.rollout.max_new_tokens,
            buffer_tokens=overlong.buffer_tokens,
            factor=overlong.factor,
        )
        for completion in group.completions
    ]
    return group.rewards + np.array(penalties, dtype=np.float64)


def _with_policy_logprobs(
    trainer: Trainer, samples: Sequence[TrainingSample], temperature: float
) -> list[TrainingSample]:
    """Note the logprobs of the policy before the first update: later updates measure their ratio from there."""
    logprobs = trainer.logprobs(samples, temperature=temperature)
    return [replace(sample, policy_logprobs=values) for sample, values in zip(samples, logprobs, strict=True)]


def _mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the rows that have it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: float(np.mean([row[name] for row in rows if name in row])) for name in names}
