"""How large an adapter's deltas are."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from relax_pipeline.lora.names import adapted_modules, lora_key
from relax_pipeline.lora.packed import leaves


@torch.no_grad()
def delta_norms(tensors: Mapping[str, torch.Tensor], scaling: float) -> dict[str, float]:
    """Return the Frobenius norm of scaling * B @ A over all modules of each leaf name, from HF-PEFT named tensors.

    Experts may be packed; each leaf counts over all of them.
    """
    squares: dict[str, torch.Tensor] = {}
    for module in adapted_modules(tensors):
        kinds = leaves(module)
        lora_A_RI, lora_B_OR = tensors[lora_key(module, "A")], tensors[lora_key(module, "B")]
        inner_RR = lora_A_RI @ lora_A_RI.mT
        for kind, part_OR in zip(kinds, lora_B_OR.chunk(len(kinds), dim=-2), strict=True):
            # |B A|^2 = sum(B'B * A A'): rank by rank, never the whole delta.
            square = ((part_OR.mT @ part_OR) * inner_RR).sum().double()
            squares[kind] = squares[kind] + square if kind in squares else square
    return {kind: scaling * max(float(square), 0.0) ** 0.5 for kind, square in squares.items()}
