"""Rotary embedding of packed sequences, all of them at once.

Megatron rotates one sequence after the other, with a dozen kernels each: two thirds of a step's time on an H200 with a
model of 135 M parameters and a dozen sequences a micro-batch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

import torch

from relax_pipeline.fused import fused
from relax_pipeline.trainer.megatron.context import Share, positions

# N of this rank's tokens, H heads, D head size, F frequencies: half of what is rotated of a head


def rotate_packed(
    x_NHD: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs_S11D: torch.Tensor,
    rotary_interleaved: bool = False,
    *,
    mscale: float = 1.0,
    cp_group: Any,
    **_: Any,
) -> torch.Tensor:
    """Return [N, H, D] with each sequence's positions counted from 0; stands for `_apply_rotary_pos_emb_thd`.

    Args:
        x_NHD: Queries or keys of this rank's tokens.
        cu_seqlens: int32, where whole sequences start; the last one is N times the ranks of cp_group.
        freqs_S11D: Of at least as many positions as the longest sequence has, twice each frequency.
        rotary_interleaved: Not done: no model of ours pairs neighbouring columns.
        mscale: Factor on the result.
        cp_group: Ranks that share each sequence.
    """
    assert not rotary_interleaved, "rotary embeddings of interleaved columns are not supported"
    share = Share(cp_group.rank(), cp_group.size())
    cos_N1F, sin_N1F = _angles(cu_seqlens, freqs_S11D, x_NHD.shape[0], share, mscale)
    return cast(torch.Tensor, _Rotate.apply(x_NHD, cos_N1F, sin_N1F))  # type: ignore[no-untyped-call]


@lru_cache(maxsize=1)  # by the tensors' identity: all layers of a pass share them
def _angles(
    cu_seqlens: torch.Tensor, freqs_S11D: torch.Tensor, count: int, share: Share, mscale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    freqs_N1F = freqs_S11D[positions(cu_seqlens, count, share), 0].chunk(2, dim=-1)[0]
    return freqs_N1F.cos() * mscale, freqs_N1F.sin() * mscale


class _Rotate(torch.autograd.Function):
    """Keeps the angles only; back-propagates by rotating the other way."""

    @staticmethod
    def forward(ctx: Any, x_NHD: torch.Tensor, cos_N1F: torch.Tensor, sin_N1F: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos_N1F, sin_N1F)
        return rotate(x_NHD, cos_N1F, sin_N1F)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_NHD: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos_N1F, sin_N1F = ctx.saved_tensors
        return rotate(grad_NHD, cos_N1F, -sin_N1F), None, None


@fused
def rotate(x_NHD: torch.Tensor, cos_N1F: torch.Tensor, sin_N1F: torch.Tensor) -> torch.Tensor:
    """Rotate column f of each head with column f + F, and leave those from 2 F on as they are."""
    half = cos_N1F.shape[-1]
    first, second = x_NHD[..., :half], x_NHD[..., half : 2 * half]
    rotated = torch.empty_like(x_NHD)
    rotated[..., :half] = (first * cos_N1F).addcmul_(second, sin_N1F, value=-1)
    rotated[..., half : 2 * half] = (second * cos_N1F).addcmul_(first, sin_N1F)
    rotated[..., 2 * half :] = x_NHD[..., 2 * half :]
    return rotated
