"""The gates of gated delta nets: where engines load adapters beside the base, none hosts one on them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from relax_pipeline.lora.names import parse_lora_key

GATES = ("in_proj_b", "in_proj_a")
"""HF leaf names of the projections to beta and alpha."""


def adapted_gates(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the sorted gates whose lora_B is not exactly zero, of an adapter in HF-PEFT names."""
    adapted = []
    for key, tensor in tensors.items():
        module, half = parse_lora_key(key)
        if half == "B" and module.rpartition(".")[2] in GATES and tensor.any():
            adapted.append(module)
    return sorted(adapted)
