"""Products of tokens with their experts' weights: one product for all experts of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from megatron.bridge.peft.utils import GroupedExpertLinearAdapter
from torch.nn import functional

# E experts, N tokens sorted by expert, I in_features, O out_features

_ALIGNMENT = 16
"""Bytes that a row must be a multiple of."""
_original = GroupedExpertLinearAdapter.forward


def grouped_linear(x_NI: torch.Tensor, weight_EOI: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Return [N, O], each token by its expert's weight; an expert without tokens has a gradient of zero.

    Args:
        x_NI: Tokens, those of the first expert first.
        weight_EOI: Of the same dtype.
        sizes: How many of the tokens are each expert's; they add up to N.
    """
    if not len(x_NI):
        return functional.linear(x_NI, weight_EOI[0])  # nothing, which the weights' gradient still goes through
    if _fits(x_NI, weight_EOI):
        ends_E = _ends(tuple(sizes), x_NI.device)
        return cast(torch.Tensor, _GroupedLinear.apply(x_NI.contiguous(), weight_EOI, ends_E))  # type: ignore[no-untyped-call]
    parts = zip(torch.split(x_NI, list(sizes)), weight_EOI.unbind(), strict=True)
    return torch.cat([functional.linear(part, weight_OI) for part, weight_OI in parts])


def adapter_forward(self: GroupedExpertLinearAdapter, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Stand for `GroupedExpertLinearAdapter.forward`, which still does what ranks share, and FP8.

    It cuts the tokens into one slice an expert, and each slice has a gradient as long as all tokens.
    """
    if self.expert_tp_group.size() > 1 or self._is_te_fp8_enabled():
        return cast(torch.Tensor, _original(self, x, *args, **kwargs))
    sizes = self._extract_expert_splits(args, kwargs)
    read = self.dropout(x) if self.dropout_position == "pre" else x
    inner = self.activation(grouped_linear(read, self.linear_in(), sizes)) * (self.alpha / self.dim)
    output = grouped_linear(inner, self.linear_out(), sizes)
    return self.dropout(output) if self.dropout_position == "post" else output


def _fits(x_NI: torch.Tensor, weight_EOI: torch.Tensor) -> bool:
    """Whether torch's grouped product takes these: on a GPU it computes in bfloat16 only."""
    aligned = all(size * x_NI.itemsize % _ALIGNMENT == 0 for size in weight_EOI.shape[1:])
    known = {torch.bfloat16} if x_NI.is_cuda else {torch.bfloat16, torch.float32}
    return aligned and weight_EOI.is_contiguous() and x_NI.dtype in known


@lru_cache(maxsize=1)  # all products of a layer have the same
def _ends(sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


class _GroupedLinear(torch.autograd.Function):
    """Keeps the tokens only where the weights have a gradient."""

    @staticmethod
    def forward(ctx: Any, x_NI: torch.Tensor, weight_EOI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_NI if ctx.needs_input_grad[1] else None, weight_EOI, ends_E)
        return functional.grouped_mm(x_NI, weight_EOI.mT, offs=ends_E)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_NO: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x_NI, weight_EOI, ends_E = ctx.saved_tensors
        grad_NO = grad_NO.contiguous()
        grad_NI = functional.grouped_mm(grad_NO, weight_EOI, offs=ends_E) if ctx.needs_input_grad[0] else None
        if x_NI is None:
            return grad_NI, None, None
        grad_EOI = functional.grouped_mm(grad_NO.mT, x_NI, offs=ends_E)
        # Some GPUs leave what was in memory where an expert has no tokens: github.com/pytorch/pytorch/issues/172439.
        used_E11 = ends_E.diff(prepend=ends_E.new_zeros(1)).bool()[:, None, None]
        return grad_NI, torch.where(used_E11, grad_EOI, 0), None
