"""Trainer and engines on one host: tensors stay in memory that both map, and only a handle is passed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from relax_pipeline.sync.blocks import Blocks
from relax_pipeline.types import Adapter


class Ipc:
    """Implements `Transport`. Each block is new memory, kept until its version is forgotten: readers may be lazy."""

    def __init__(self, *, same_gpu: bool) -> None:
        """`same_gpu`: whether each engine sees the GPU of this rank; else blocks lie in the host's memory."""
        self._same_gpu = same_gpu
        self._blocks = Blocks()

    def adapter(self, adapter: Adapter) -> Adapter:
        """See `Transport.adapter`."""
        return replace(adapter, tensors=self.weights(adapter.tensors, version=adapter.info.version))

    def weights(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> Mapping[str, torch.Tensor]:
        """See `Transport.weights`."""
        return self._blocks.pack(tensors, version=version, on_gpu=self._same_gpu)

    def forget(self, version: int) -> None:
        """See `Transport.forget`."""
        self._blocks.forget(version)

    def close(self) -> None:
        """See `Transport.close`."""
        self._blocks.close()
