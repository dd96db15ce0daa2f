"""The scored groups that a step learns from, and the training samples they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from relax_pipeline.rl.advantages import AdvantageKind, compute_advantages
from relax_pipeline.types import Completion, DataPosition, Prompt, Score, TrainingSample


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The completions of one prompt, scored. Lists are parallel."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    texts: tuple[str, ...]
    scores: tuple[Score, ...]

    @property
    def rewards(self) -> NDArray[np.float64]:
        """[G]."""
        return np.array([score.value for score in self.scores], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Rollout:
    """All that one training step learns from."""

    step: int
    groups: tuple[RolloutGroup, ...]
    """Groups that train."""
    dropped: tuple[RolloutGroup, ...]
    """Groups without reward variance, drawn and not trained."""
    next_position: DataPosition
    """Data position once this rollout is consumed."""
    seconds: Mapping[str, float]
    """Wall seconds of `generate` and `score`."""

    @property
    def drawn(self) -> tuple[RolloutGroup, ...]:
        """All groups, dropped ones included: what the policy did on the prompts it was given."""
        return self.groups + self.dropped


def make_samples(
    rollout: Rollout,
    rewards_by_group: Sequence[NDArray[np.float64]],
    *,
    advantage: AdvantageKind,
    filter_overlong: bool,
) -> list[list[TrainingSample]]:
    """Return the samples of each group.

    Aborted completions are left out, of the baseline too: the reward of an unfinished text says nothing about the
    policy. A group of nothing else is left out whole. With filter_overlong, a completion that was cut at the length
    limit counts in its group's baseline and trains no token (Yu et al. 2025, DAPO, arXiv:2503.14476, section 3.4).

    Args:
        rollout: Its groups that train.
        rewards_by_group: Parallel to the groups and their completions.
        advantage: See compute_advantages.
        filter_overlong: Mask completions that ended for their length.

    Raises:
        ValueError: Rewards and completions are not parallel.
    """
    kept_by_group = [
        [
            (group.prompt, completion, reward)
            for completion, reward in zip(group.completions, rewards, strict=True)
            if completion.finish_reason != "abort"
        ]
        for group, rewards in zip(rollout.groups, rewards_by_group, strict=True)
    ]
    kept_by_group = [kept for kept in kept_by_group if kept]
    rewards_kept = [np.array([reward for _, _, reward in kept]) for kept in kept_by_group]
    return [
        [
            _sample(prompt, completion, float(credit), filter_overlong)
            for (prompt, completion, _), credit in zip(kept, advantages, strict=True)
        ]
        for kept, advantages in zip(kept_by_group, compute_advantages(rewards_kept, advantage), strict=True)
    ]


def split_updates(groups: Sequence[Sequence[TrainingSample]], updates: int) -> list[list[TrainingSample]]:
    """Cut the groups, in order, into samples of that many optimizer steps, as equal in groups as they go.

    Fewer groups than updates give one update a group.
    """
    parts = min(updates, len(groups))
    bounds = [part * len(groups) // max(parts, 1) for part in range(parts + 1)]
    return [list(chain.from_iterable(groups[start:end])) for start, end in pairwise(bounds)]


def _sample(prompt: Prompt, completion: Completion, advantage: float, filter_overlong: bool) -> TrainingSample:
    trains = not (filter_overlong and completion.finish_reason == "length")
    return TrainingSample(
        prompt_ids=np.array(prompt.token_ids, dtype=np.int64),
        completion_ids=completion.token_ids,
        loss_mask=np.full(len(completion.token_ids), trains),
        rollout_logprobs=completion.rollout_logprobs,
        advantage=advantage,
        policy_version=completion.policy_version,
    )
