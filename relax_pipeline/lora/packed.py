"""Experts that a checkpoint packs into one weight a layer, while adapters name them one by one."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from relax_pipeline.lora.fold import fold
from relax_pipeline.lora.names import Half, lora_key

_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Leaf of a packed weight, [experts, out, in], to the modules it holds, one below the other."""
_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.\d+\.(?P<leaf>\w+)")


def packed_weight(module: str) -> str | None:
    """Return the packed weight that would hold an expert's module, or None where the module is no expert's."""
    match = _EXPERT.fullmatch(module)
    leaves = [packed for packed, parts in _PARTS.items() if match and match["leaf"] in parts]
    return f"{match['experts']}.{leaves[0]}" if match and leaves else None


def fold_experts(
    weight_EOI: torch.Tensor, name: str, adapter: Mapping[str, torch.Tensor], *, scaling: float
) -> torch.Tensor | None:
    """Return a packed weight with its experts' deltas, each folded as `fold` does; None where it has none.

    Args:
        weight_EOI: [experts, out_features, in_features].
        name: Its full HF name.
        adapter: All of it, by HF-PEFT name.
        scaling: As for `fold`.

    Raises:
        AdapterError: The shapes do not agree.
    """
    experts, _, leaf = name.rpartition(".")
    parts = _PARTS.get(leaf, ())
    if not parts or lora_key(f"{experts}.0.{parts[0]}", "A") not in adapter:
        return None

    def stacked(part: str, half: Half) -> torch.Tensor:
        keys = [lora_key(f"{experts}.{expert}.{part}", half) for expert in range(len(weight_EOI))]
        return torch.stack([adapter[key] for key in keys]).to(weight_EOI.device)

    if not any(stacked(part, "B").any() for part in parts):
        return None
    folded = [
        fold(rows_EOI, lora_A_RI=stacked(part, "A"), lora_B_OR=stacked(part, "B"), scaling=scaling)
        for part, rows_EOI in zip(parts, weight_EOI.chunk(len(parts), dim=1), strict=True)
    ]
    return torch.cat(folded, dim=1)
