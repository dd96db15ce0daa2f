"""How tensors leave the trainer's process: packed there into what passes any queue, opened where an engine reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import torch

from relax_pipeline.config import RunConfig
from relax_pipeline.types import Adapter


class Transport(Protocol):
    """Lives in the process of the trainer's first rank. What is packed is a mapping still, and passes any queue."""

    def adapter(self, adapter: Adapter) -> Adapter:
        """Return the adapter with its tensors packed."""
        ...

    def weights(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> Mapping[str, torch.Tensor]:
        """Return one bucket of a version's weights packed."""
        ...

    def forget(self, version: int) -> None:
        """Drop what was packed of a version that no engine will be sent any more."""
        ...

    def close(self) -> None:
        """Drop everything."""
        ...


def transport_kind(config: RunConfig, *, on_gpus: bool) -> Literal["object_store", "ipc", "nccl", "disk"]:
    """Return how weights travel: as sync.transport says, or as is fastest of what was measured.

    Args:
        config: Of the run.
        on_gpus: Whether the trainer has GPUs; engines have some then, unless engine.device says otherwise.
    """
    if config.sync.transport != "auto":
        return config.sync.transport
    if on_one_gpu(config):
        return "ipc"
    apart = not config.cluster.colocate and config.engine.num_gpus == 1 and config.engine.device != "cpu"
    return "nccl" if on_gpus and apart else "object_store"


def on_one_gpu(config: RunConfig) -> bool:
    """Return whether all engines see the GPU of the trainer's first rank, because it is the only one."""
    return config.cluster.colocate and config.trainer.world_size == 1
