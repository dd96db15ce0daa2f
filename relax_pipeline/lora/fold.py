"""Add one LoRA delta to one weight."""

from __future__ import annotations

import torch

from relax_pipeline.errors import AdapterError


def fold(weight_OI: torch.Tensor, *, lora_A_RI: torch.Tensor, lora_B_OR: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return W + scaling * (B @ A): computed in float32, rounded once to W's dtype, W itself unchanged.

    Source: Hu et al. 2021, arXiv:2106.09685, section 4.1.

    Args:
        weight_OI: Frozen weight, [out_features, in_features], or [experts, out_features, in_features].
        lora_A_RI: [rank, in_features], with the same leading dimension.
        lora_B_OR: [out_features, rank], with the same leading dimension.
        scaling: alpha / rank, or alpha / sqrt(rank) for rank-stabilised adapters.

    Raises:
        AdapterError: The shapes do not agree; nothing is transposed to make them fit.
    """
    expected = (*lora_B_OR.shape[:-1], lora_A_RI.shape[-1])
    if lora_A_RI.shape[-2] != lora_B_OR.shape[-1] or tuple(weight_OI.shape) != expected:
        raise AdapterError(
            f"lora_B {tuple(lora_B_OR.shape)} @ lora_A {tuple(lora_A_RI.shape)} does not fit "
            f"a weight of shape {tuple(weight_OI.shape)}"
        )
    delta = torch.matmul(lora_B_OR.float(), lora_A_RI.float())
    return (weight_OI.float() + scaling * delta).to(weight_OI.dtype)
