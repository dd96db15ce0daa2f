"""Gated delta nets on torch alone: the three kernels Megatron takes from flash-linear-attention, which needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from megatron.core.ssm.gated_delta_net import common, gdn
from torch.nn import functional

from relax_pipeline.trainer.megatron.compat import Patch

# 1 row of S packed tokens, C channels, K kernel width


def patches() -> list[Patch]:
    """Return what replaces the kernels."""
    reason = "flash-linear-attention is not installed"
    kernels = {"l2norm": _l2norm, "causal_conv1d": _causal_conv1d, "chunk_gated_delta_rule": _gated_delta_rule}
    return [
        Patch(common, "HAVE_FLA", True, reason),
        *(
            Patch(module, name, kernel, reason)
            for module in (common, gdn)
            for name, kernel in kernels.items()
            if hasattr(module, name)
        ),
    ]


def _sequences(bounds: torch.Tensor | None, length: int) -> Iterator[slice]:
    """Yield where each packed sequence lies; the state does not pass from one to the next."""
    for start, end in pairwise([0, length] if bounds is None else bounds.tolist()):
        yield slice(start, end)


def _l2norm(x: torch.Tensor, eps: float = 1e-6, **_: Any) -> torch.Tensor:
    return x * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + eps).to(x.dtype)


def _causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return each channel's convolution with its own kernel, [1, S, C], from x [1, S, C] and weight [C, K]."""
    outputs = []
    for span in _sequences(cu_seqlens, x.shape[1]):
        padded_1CS = functional.pad(x[:, span].transpose(1, 2), (weight.shape[-1] - 1, 0))
        outputs.append(functional.conv1d(padded_1CS, weight[:, None], bias, groups=len(weight)).transpose(1, 2))
    output = torch.cat(outputs, dim=1)
    return functional.silu(output) if activation in ("silu", "swish") else output, None


def _gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Megatron's own torch rule, a sequence at a time."""
    outputs = [
        common.torch_chunk_gated_delta_rule(
            query[:, span],
            key[:, span],
            value[:, span],
            g=g[:, span],
            beta=beta[:, span],
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )[0]
        for span in _sequences(cu_seqlens, query.shape[1])
    ]
    return torch.cat(outputs, dim=1), None
