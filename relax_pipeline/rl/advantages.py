"""How much better than expected each completion was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

AdvantageKind = Literal["group", "group_std", "rloo", "reinforce_plus_plus"]
Rewards = NDArray[np.float64]


def compute_advantages(rewards: Sequence[Rewards], kind: AdvantageKind) -> list[Rewards]:
    """Return one advantage for each reward; groups may differ in size.

    Standard deviations are those of a sample (divided by n - 1). A completion alone in its group has nothing to be
    compared with: its advantage is 0, except under `reinforce_plus_plus`.

    Sources:
        group: reward - group mean. Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783.
        group_std: group / (group std + 1e-6). Shao et al. 2024 (GRPO), arXiv:2402.03300, section 4.1.
        rloo: reward - mean of the others in the group. Ahmadian et al. 2024, arXiv:2402.14740.
        reinforce_plus_plus: (reward - batch mean) / (batch std + 1e-8). Hu et al. 2025, arXiv:2501.03262.
    """
    if not rewards:
        return []
    match kind:
        case "group":
            return [group - group.mean() for group in rewards]
        case "group_std":
            return [_standardise(group, of=group, eps=1e-6) for group in rewards]
        case "rloo":
            # r - (sum - r) / (n - 1), written so that a group of one is 0.
            return [(group - group.mean()) * group.size / max(group.size - 1, 1) for group in rewards]
        case "reinforce_plus_plus":
            batch = np.concatenate(rewards)
            return [_standardise(group, of=batch, eps=1e-8) for group in rewards]


def has_variance(rewards: Rewards) -> bool:
    """Whether some reward differs from the first.

    Not a test on the standard deviation: that of equal fractions is often a rounding error above 0.
    """
    return bool((rewards != rewards[:1]).any())


def _standardise(rewards: Rewards, *, of: Rewards, eps: float) -> Rewards:
    std = of.std(ddof=1) if of.size > 1 else 0.0
    return (rewards - of.mean()) / (std + eps)
