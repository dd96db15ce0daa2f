"""How large an adapter's deltas are."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from relax_pipeline.lora.names import adapted_modules, lora_key


@torch.no_grad()
def delta_norms(tensors: Mapping[str, torch.Tensor], scaling: float) -> dict[str, float]:
    """Return the Frobenius norm of scaling * B @ A over all modules of each leaf name, from HF-PEFT named tensors."""
    squares: dict[str, torch.Tensor] = {}
    for module in adapted_modules(tensors):
        lora_A_RI, lora_B_OR = tensors[lora_key(module, "A")], tensors[lora_key(module, "B")]
        # |B A|^2 = sum(B'B * A A'): rank by rank, never the whole delta.
        square = ((lora_B_OR.mT @ lora_B_OR) * (lora_A_RI @ lora_A_RI.mT)).sum().double()
        kind = module.rpartition(".")[2]
        squares[kind] = squares[kind] + square if kind in squares else square
    return {kind: scaling * max(float(square), 0.0) ** 0.5 for kind, square in squares.items()}
