"""What one optimizer step is normalised by."""

from __future__ import annotations

from collections.abc import Sequence

from relax_pipeline.errors import TrainerError
from relax_pipeline.types import TrainingSample


def trained_totals(samples: Sequence[TrainingSample]) -> tuple[int, int]:
    """Return how many tokens train, and in how many sequences, over all micro-batches and ranks.

    Raises:
        TrainerError: None does.
    """
    tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
    if tokens == 0:
        raise TrainerError(f"none of the {len(samples)} samples has a token to train on")
    return tokens, sum(bool(sample.loss_mask.any()) for sample in samples)
