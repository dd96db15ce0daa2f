"""Tensors in one block that is passed whole, through a queue that moves large arrays without pickling them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from relax_pipeline.rollout.block import Block, Place, fill, lay_out, num_bytes
from relax_pipeline.rollout.shared import SharedTensors


class CarriedTensors(Block):
    """A block in its maker's own memory; where it arrives it is in memory that an engine's server can map."""

    def __init__(self, places: Mapping[str, Place], content: torch.Tensor) -> None:
        super().__init__(places)
        self._content = content

    @classmethod
    def write(cls, tensors: Mapping[str, torch.Tensor]) -> CarriedTensors:
        """Copy tensors of one device into a new block; from a GPU into memory that it writes at full speed."""
        places = lay_out(tensors)
        pinned = next(iter(tensors.values())).is_cuda
        content = torch.empty(num_bytes(places), dtype=torch.uint8, pin_memory=pinned)
        fill(content, places, tensors)
        return cls(places, content)

    def whole(self) -> torch.Tensor:
        """See `Block.whole`."""
        return self._content

    def __reduce__(self) -> tuple[object, tuple[dict[str, Place], NDArray[np.uint8]]]:
        return _arrived, (self.places, self._content.numpy())


def _arrived(places: dict[str, Place], content: NDArray[np.uint8]) -> SharedTensors:
    block, memory = SharedTensors.allocate(places)
    np.copyto(memory.numpy(), content)
    return block
