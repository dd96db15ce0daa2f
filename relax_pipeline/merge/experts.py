"""Pair adapters of routed experts with a base that may store them otherwise: per expert or packed, fused or apart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from relax_pipeline.errors import MergeError
from relax_pipeline.merge.deltas import Delta
from relax_pipeline.merge.expert_weights import ExpertWeights, find_experts
from relax_pipeline.merge.layout import IN_OUT_IN_MEMORY, PROJECTIONS, Projection, gate_up_rows
from relax_pipeline.merge.names import EXPERT, EXPERT_LEAVES
from relax_pipeline.merge.pairing import Pairing, Parts, Sides, no_target, refuse_dora

PACKED_MODULE = re.compile(r"(?P<parent>.+\.experts)\.(?P<leaf>gate_up_proj|gate_proj|up_proj|down_proj)")
FLAT_MODULE = re.compile(r"(?P<parent>.+\.experts)(\.base_layer)*")


def pair_experts(module: str, parts: Parts, sides: Sides) -> Pairing | None:
    """Pair one expert adapter module, or return None where its name is not one.

    Three forms are known: `experts.N.gate_proj` with 2-D factors, `experts.gate_up_proj` with 3-D factors, and peft's
    target_parameters, `experts(.base_layer)` with flattened 2-D factors whose dimensions say which parameter it is.

    Raises:
        MergeError: The base has no such experts, dimensions do not fit or do not decide.
    """
    one, packed, flat = (pattern.fullmatch(module) for pattern in (EXPERT, PACKED_MODULE, FLAT_MODULE))
    match = one or packed or flat
    if match is None:
        return None
    refuse_dora(module, parts)
    weights = find_experts(match["parent"], sides)
    if weights is None:
        raise no_target(module)
    template = Delta(module, parts["A"], parts["B"], 0.0, num_experts=weights.num_experts)
    if one:
        if int(one["index"]) >= weights.num_experts:
            raise MergeError(f"adapter of {module}: the base has {weights.num_experts} experts in {weights.parent}")
        template = replace(template, target_expert=int(one["index"]))
        return _pair(module, _projection(one["leaf"]), template, sides, weights)
    if packed:
        return _pair(module, _projection(packed["leaf"]), replace(template, stacking="stacked"), sides, weights)
    projection, swapped = _flat_projection(module, parts, sides, weights)
    name = f"{match['parent']}.{projection}"
    return _pair(name, projection, replace(template, stacking="flat", swapped=swapped), sides, weights)


def _projection(leaf: str) -> Projection:
    name = {short: long for long, short in EXPERT_LEAVES}.get(leaf, leaf)
    for projection in PROJECTIONS:
        if projection == name:
            return projection
    raise MergeError(f"expert projection {leaf!r} is not known; known are {', '.join(PROJECTIONS)}, w1, w2, w3")


def _flat_projection(module: str, parts: Parts, sides: Sides, weights: ExpertWeights) -> tuple[Projection, bool]:
    """Return which parameter a flattened adapter is of, and whether its A runs over outputs (peft before 0.19)."""
    A, B = sides.shape(parts["A"]), sides.shape(parts["B"])
    candidates = [p for p in PROJECTIONS if p in weights.packed] or ["gate_up_proj", "down_proj"]
    found: dict[Projection, set[bool]] = {}
    for projection in candidates:
        features = weights.features(projection)
        for swapped in (False, True):
            if (A[-1], B[0]) == (features[::-1] if features and swapped else features):
                found.setdefault(projection, set()).add(swapped)
    if len(found) != 1:
        raise MergeError(
            f"adapter of {module}: A {list(A)} and B {list(B)} fit {sorted(found) or 'none'} of {candidates} in "
            f"{weights.parent}, expected exactly one"
        )
    projection, orientations = found.popitem()
    return projection, orientations.pop() if len(orientations) == 1 else _square_is_swapped(module, sides)


def _square_is_swapped(module: str, sides: Sides) -> bool:
    """Return the convention of the peft version that wrote a square adapter."""
    if sides.base.config.get("model_type") in IN_OUT_IN_MEMORY:
        return False
    version = re.match(r"(\d+)\.(\d+)", sides.adapter.config.peft_version)
    if version is None:
        raise MergeError(
            f"adapter of {module} is square, and adapter_config.json has no peft_version to tell whether A runs over "
            "inputs (0.19 and later) or outputs; add the version it was trained with"
        )
    return (int(version[1]), int(version[2])) < (0, 19)


def _pair(name: str, projection: Projection, template: Delta, sides: Sides, weights: ExpertWeights) -> Pairing:
    rank, scaling = sides.adapter.config.rank_of(name), sides.adapter.config.scaling_of(name)
    A, B = sides.shape(template.a_key), sides.shape(template.b_key)
    expected = _factor_shapes(projection, template, weights, rank)
    if expected != (A, B):
        raise MergeError(
            f"adapter of {template.module}: A is {list(A)} and B is {list(B)}, expected {list(expected[0])} and "
            f"{list(expected[1])} for {projection} of {weights.parent} at rank {rank}"
        )
    placed: dict[str, tuple[Delta, ...]] = {}
    for target, delta in _place(replace(template, scaling=scaling), projection, sides, weights):
        placed[target] = (*placed.get(target, ()), delta)
    return Pairing(template.module, "experts", rank, scaling, placed)


def _factor_shapes(
    projection: Projection, template: Delta, weights: ExpertWeights, rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    features = weights.features(projection)
    if features is None:
        raise no_target(template.module)
    ins, outs = features[::-1] if template.swapped else features
    if template.stacking == "stacked":
        return (weights.num_experts, rank, ins), (weights.num_experts, outs, rank)
    width = rank * (weights.num_experts if template.stacking == "flat" else 1)
    return (width, ins), (outs, width)


def _place(delta: Delta, projection: Projection, sides: Sides, weights: ExpertWeights) -> Iterator[tuple[str, Delta]]:
    """Yield (base module, delta) for every weight that holds a part of this projection."""
    if projection in weights.packed:
        yield weights.packed[projection].module, replace(delta, transposed=weights.transposed)
    elif projection in weights.apart:
        experts = range(weights.num_experts) if delta.target_expert is None else [delta.target_expert]
        for expert in experts:
            placed = replace(delta, source_expert=expert, target_expert=None)
            yield weights.apart[projection][expert].module, placed
    elif projection == "gate_up_proj":
        gate, up = _half_rows(sides, weights)
        yield from _place(replace(delta, source_rows=gate), "gate_proj", sides, weights)
        yield from _place(replace(delta, source_rows=up), "up_proj", sides, weights)
    else:
        gate, up = _half_rows(sides, weights)
        rows = gate if projection == "gate_proj" else up
        fused = weights.packed["gate_up_proj"].module
        yield fused, replace(delta, target_rows=rows, transposed=weights.transposed)


def _half_rows(sides: Sides, weights: ExpertWeights) -> tuple[slice, slice]:
    features = weights.features("gate_up_proj")
    return gate_up_rows(sides.base, features[1] // 2 if features else 0)
