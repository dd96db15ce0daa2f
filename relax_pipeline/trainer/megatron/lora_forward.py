"""The forward pass of an adapted layer that no rank shares: the adapter is added by the matrix product itself.

Megatron-Bridge scales an adapter's whole output and adds it in a pass of its own: five passes over memory a layer, and
as many backwards, where a product that accumulates takes one.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.bridge.peft.lora_layers import LoRALinear
from megatron.bridge.peft.utils import ParallelLinearAdapter
from torch.nn import functional

_original = LoRALinear.forward


def forward(self: LoRALinear, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stand for `LoRALinear.forward`, which still does what is split over ranks, drops out or is switched off."""
    adapter = self.adapter
    if not (self._adapter_enabled and _alone(adapter)):
        result: tuple[torch.Tensor, torch.Tensor | None] = _original(self, x, *args, **kwargs)
        return result
    output, bias, read = self.base_linear_forward(x, *args, **kwargs)
    inner = functional.linear(read, adapter.linear_in.weight) * (adapter.alpha / adapter.dim)
    added = torch.addmm(output.flatten(0, -2), inner.flatten(0, -2), adapter.linear_out.weight.t())
    return added.view(output.shape), bias


def _alone(adapter: Any) -> bool:
    return (
        type(adapter) is ParallelLinearAdapter
        and not adapter.is_expert
        and adapter.tp_group.size() == 1
        and isinstance(adapter.activation, torch.nn.Identity)
        and isinstance(adapter.dropout, torch.nn.Identity)
    )
