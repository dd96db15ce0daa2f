"""The blocks that the trainer's first rank has packed, until their versions are let go."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from relax_pipeline.rollout.block import Block
from relax_pipeline.rollout.device import DeviceTensors
from relax_pipeline.rollout.shared import SharedTensors

SHARE_OF_GPU = 8
"""One part in so many of a GPU's memory may hold blocks: all adapters of usual size, and models of a few billion
parameters. The trainer needs the rest."""


class Blocks:
    """Packs tensors where they lie; what a GPU has no room for goes to the host's memory."""

    def __init__(self) -> None:
        self._of_version: dict[int, list[Block]] = {}

    def pack(self, tensors: Mapping[str, torch.Tensor], *, version: int, on_gpu: bool = True) -> Block:
        """Copy tensors of one device into a new block of a version.

        Args:
            tensors: At least one with an entry.
            version: Until which is let go the block stays.
            on_gpu: Whether engines can read it there.
        """
        device = next(iter(tensors.values())).device
        size = sum(tensor.nbytes for tensor in tensors.values())
        stays = on_gpu and device.type == "cuda" and size <= self._room(device)
        block = DeviceTensors.write(tensors) if stays else SharedTensors.write(tensors)
        self._of_version.setdefault(version, []).append(block)
        return block

    def forget(self, version: int) -> None:
        """Release a version's blocks."""
        for block in self._of_version.pop(version, ()):
            block.release()

    def close(self) -> None:
        """Release all blocks."""
        for version in list(self._of_version):
            self.forget(version)

    def _room(self, device: torch.device) -> int:
        """Return the bytes that further blocks may take on a GPU."""
        used = sum(b.num_bytes for blocks in self._of_version.values() for b in blocks if isinstance(b, DeviceTensors))
        return torch.cuda.get_device_properties(device).total_memory // SHARE_OF_GPU - used
