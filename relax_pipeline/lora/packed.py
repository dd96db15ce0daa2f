"""Adapters of experts, all of a layer in one tensor, as they are trained and sent; PEFT names them expert by expert.

Thousands of small tensors take a sync seconds, each a few microseconds at every hand it passes through.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

import torch

from relax_pipeline.lora.names import HALVES, lora_key, parse_lora_key

# E experts, R rank, I in_features, O out_features
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Leaf of a packed module to those it stands for in each expert, one below the other in lora_B, with one lora_A."""
_PACKED = re.compile(rf"(?P<experts>.+\.experts)\.(?P<leaf>{'|'.join(_PARTS)})")
_SINGLE = re.compile(r"(?P<experts>.+\.experts)\.(?P<expert>\d+)\.(?P<leaf>\w+)")


def is_packed(module: str) -> bool:
    """Return whether a module's name is that of all experts of a layer."""
    return _PACKED.fullmatch(module) is not None


def leaves(module: str) -> tuple[str, ...]:
    """Return the HF leaf names that an adapted module stands for: its own, or those of its experts."""
    match = _PACKED.fullmatch(module)
    return _PARTS[match["leaf"]] if match else (module.rpartition(".")[2],)


def packed_module(module: str) -> str | None:
    """Return the packed module that an expert's one is part of, or None where the module is no expert's."""
    match = _SINGLE.fullmatch(module)
    found = [packed for packed, parts in _PARTS.items() if match and match["leaf"] in parts]
    return f"{match['experts']}.{found[0]}" if match and found else None


def pair(tensors: Mapping[str, torch.Tensor], module: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return lora_A and lora_B of a module, views where it is an expert's; None where the adapter has none for it."""
    packed, match = packed_module(module), _SINGLE.fullmatch(module)
    lora_A, lora_B = (tensors.get(lora_key(packed or module, half)) for half in HALVES)
    if lora_A is None or lora_B is None:
        return None
    if packed and match:
        expert, parts = int(match["expert"]), leaves(packed)
        return lora_A[expert], lora_B[expert].chunk(len(parts))[parts.index(match["leaf"])]
    return lora_A, lora_B


def packed_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return weights' shapes by module, with experts that are named one by one as [experts, out, in] of packed ones."""
    packed: dict[str, tuple[int, ...]] = {}
    members = Counter(name for module in shapes if (name := packed_module(module)))
    for module, shape in shapes.items():
        name = packed_module(module)
        if name is None:
            packed[module] = shape
        else:
            parts = len(leaves(name))
            packed[name] = (members[name] // parts, parts * shape[0], shape[1])
    return packed


def unpacked(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return an adapter with a pair [rank, in] and [out, rank] for each module of each expert, as PEFT names them.

    Args:
        tensors: By HF-PEFT name; those of packed modules are [experts, rank, in] and [experts, out, rank].

    Returns:
        Views; modules that share a lora_A share its memory.
    """
    named: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        module, half = parse_lora_key(key)
        match = _PACKED.fullmatch(module)
        if match is None:
            named[key] = tensor
            continue
        parts = _PARTS[match["leaf"]]
        for expert, of_expert in enumerate(tensor):
            halves = of_expert.chunk(len(parts)) if half == "B" else [of_expert] * len(parts)
            for leaf, part in zip(parts, halves, strict=True):
                named[lora_key(f"{match['experts']}.{expert}.{leaf}", half)] = part
    return named
