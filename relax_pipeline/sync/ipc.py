"""Trainer and engines on one host: tensors stay in memory that both map, and only its name is passed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from relax_pipeline.rollout.shared import SharedTensors
from relax_pipeline.types import Adapter


class Ipc:
    """Implements `Transport`. Each block is new memory, kept until its version is forgotten: readers may be lazy."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[SharedTensors]] = {}

    def adapter(self, adapter: Adapter) -> Adapter:
        """See `Transport.adapter`."""
        return replace(adapter, tensors=self.weights(adapter.tensors, version=adapter.info.version))

    def weights(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> Mapping[str, torch.Tensor]:
        """See `Transport.weights`."""
        block = SharedTensors.write(tensors)
        self._blocks.setdefault(version, []).append(block)
        return block

    def forget(self, version: int) -> None:
        """See `Transport.forget`."""
        for block in self._blocks.pop(version, ()):
            block.release()

    def close(self) -> None:
        """See `Transport.close`."""
        for version in list(self._blocks):
            self.forget(version)
