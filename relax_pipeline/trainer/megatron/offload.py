"""Lend the GPU to the engines of a colocated run: the base and the optimizer's state wait in host memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from relax_pipeline.trainer.megatron.model import Model
from relax_pipeline.trainer.megatron.optimizer import MasterOptimizer


@torch.no_grad()
def sleep(model: Model, optimizer: MasterOptimizer) -> None:
    """Move to pinned host memory what no hook of Megatron's watches: all but the adapter and its gradients."""
    for parameter in _movable(model, optimizer):
        if parameter.device.type == "cuda":
            host = torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=True)
            parameter.data = host.copy_(parameter.data)
    optimizer.move_moments(torch.device("cpu"))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@torch.no_grad()
def wake(model: Model, optimizer: MasterOptimizer, device: torch.device) -> None:
    """Bring everything back, bit by bit as it was."""
    for parameter in _movable(model, optimizer):
        parameter.data = parameter.data.to(device, non_blocking=True)
    optimizer.move_moments(device)
    if device.type == "cuda":
        torch.cuda.synchronize()


def _movable(model: Model, optimizer: MasterOptimizer) -> Iterable[nn.Parameter]:
    yield from model.frozen().values()
    yield from optimizer.masters.values()
