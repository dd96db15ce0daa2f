"""Pair adapters of fused projections with a base that stores them apart, and the other way round."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from relax_pipeline.merge.deltas import Delta
from relax_pipeline.merge.layout import gate_up_rows, part_rows
from relax_pipeline.merge.names import find_name
from relax_pipeline.merge.pairing import Pairing, Parts, Sides, checked_rank, refuse_dora, shape_error

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
"""Leaf to what it concatenates along the outputs, as engines name them."""


def pair_fused(module: str, parts: Parts, sides: Sides) -> Pairing | None:
    """Pair a 2-D LoRA module whose own weight the base lacks, or return None where no fusion explains it.

    Raises:
        MergeError: The layout is not known, or shapes do not agree.
    """
    parent, _, leaf = module.rpartition(".")
    placed = _over_parts(parent, leaf, parts, sides) or _into_fused(parent, leaf, parts, sides)
    if placed is None:
        return None
    refuse_dora(module, parts)
    A, B = sides.shape(parts["A"]), sides.shape(parts["B"])
    rank, scaling = checked_rank(module, sides, A, B), sides.adapter.config.scaling_of(module)
    template = Delta(module, parts["A"], parts["B"], scaling)
    deltas = {target: (replace(template, source_rows=take, target_rows=put),) for target, (take, put) in placed.items()}
    return Pairing(module, "fused", rank, scaling, deltas)


Rows = tuple[slice | None, slice | None]
"""(rows of the adapter to take, rows of the weight to change)"""


def _over_parts(parent: str, leaf: str, parts: Parts, sides: Sides) -> dict[str, Rows] | None:
    """The adapter is fused, the base has the parts: cut lora_B at the parts' sizes."""
    names = [find_name(f"{parent}.{part}", sides.weights) for part in FUSED.get(leaf, ())]
    targets = [name for name in names if name is not None]
    if not targets or len(targets) != len(names):
        return None
    A, B = sides.shape(parts["A"]), sides.shape(parts["B"])
    sizes = [sides.weights[target].shape for target in targets]
    if B[0] != sum(size[0] for size in sizes) or any(size[1] != A[-1] for size in sizes):
        raise shape_error(f"{parent}.{leaf}", A, B, sides.weights[targets[0]])
    if leaf == "gate_up_proj":
        cuts = list(gate_up_rows(sides.base, sizes[0][0]))
    else:
        ends = list(accumulate(size[0] for size in sizes))
        cuts = [slice(end - size[0], end) for end, size in zip(ends, sizes, strict=True)]
    return {target: (cut, None) for target, cut in zip(targets, cuts, strict=True)}


def _into_fused(parent: str, leaf: str, parts: Parts, sides: Sides) -> dict[str, Rows] | None:
    """The base is fused, the adapter has a part: find the part's rows."""
    fused = next((name for name in ("qkv_proj", "gate_up_proj") if leaf in FUSED[name]), None)
    target = find_name(f"{parent}.{fused}", sides.weights) if fused else None
    if target is None:
        return None
    weight = sides.weights[target]
    rows = part_rows(sides.base, leaf, weight.shape[0])
    A, B = sides.shape(parts["A"]), sides.shape(parts["B"])
    if (len(range(weight.shape[0])[rows]), weight.shape[1]) != (B[0], A[-1]):
        raise shape_error(f"{parent}.{leaf}", A, B, weight)
    return {target: (None, rows)}
