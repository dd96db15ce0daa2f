"""What the ranks of an fsdp trainer have in common: process groups, and sums over all of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from relax_pipeline.config import FsdpTrainerConfig
from relax_pipeline.models import resolve_device
from relax_pipeline.trainer.base import RankLayout


def join(layout: RankLayout, settings: FsdpTrainerConfig) -> torch.device:
    """Join the process group, where there is one, and return this rank's device."""
    device = resolve_device(settings.device)
    if layout.world_size > 1:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=layout.init_method,
            rank=layout.rank,
            world_size=layout.world_size,
            timeout=timedelta(seconds=settings.step_timeout_seconds),
        )
    return device


def saving_group(layout: RankLayout, settings: FsdpTrainerConfig) -> dist.ProcessGroup | None:
    """Return a group of all ranks for threads that save while the others train; None for one rank."""
    if layout.world_size == 1:
        return None
    timeout = timedelta(seconds=settings.step_timeout_seconds)
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return group


def gather(mine: dict[int, NDArray[np.float32]], layout: RankLayout) -> dict[int, NDArray[np.float32]]:
    """Return the entries of all ranks, on all of them."""
    if layout.world_size == 1:
        return mine
    parts: list[Any] = [None] * layout.world_size
    dist.all_gather_object(parts, mine)
    return {index: values for part in parts for index, values in part.items()}


def reduce(values: dict[str, torch.Tensor], operation: dist.ReduceOp.RedOpType) -> None:
    """All-reduce scalars in place, as one message."""
    packed = torch.stack([value.double() for value in values.values()])
    dist.all_reduce(packed, op=operation)
    values.update(zip(values, packed.unbind(), strict=True))
