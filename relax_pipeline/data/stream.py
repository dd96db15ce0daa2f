"""The order in which a run draws its prompts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from relax_pipeline.data.dataset import PromptDataset
from relax_pipeline.errors import DataError
from relax_pipeline.types import DataPosition, Prompt


class PromptStream:
    """Draws prompts epoch after epoch, each row once an epoch. Its only state is the position."""

    def __init__(self, dataset: PromptDataset, *, seed: int, shuffle: bool, position: DataPosition) -> None:
        """Go on at a position.

        Raises:
            DataError: The position is not one of this dataset.
        """
        if not 0 <= position.offset < len(dataset):
            raise DataError(
                f"data position {position.offset} of epoch {position.epoch} lies outside the {len(dataset)} rows: "
                "the prompts are not those this run began with"
            )
        self._dataset = dataset
        self._seed = seed
        self._shuffle = shuffle
        self._position = position
        self._order = self._epoch_order(position.epoch)

    def take(self, n: int) -> tuple[list[Prompt], DataPosition]:
        """Return the next n prompts and the position after them."""
        return [self._next() for _ in range(n)], self._position

    def _next(self) -> Prompt:
        epoch, offset = self._position.epoch, self._position.offset
        prompt = self._dataset.prompt(int(self._order[offset]))
        if offset + 1 < len(self._dataset):
            self._position = DataPosition(epoch, offset + 1)
        else:
            self._position = DataPosition(epoch + 1, 0)
            self._order = self._epoch_order(epoch + 1)
        return prompt

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        """Return the rows in the order of one epoch, [rows]."""
        if not self._shuffle:
            return np.arange(len(self._dataset))
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._seed, epoch])))
        return generator.permutation(len(self._dataset))
