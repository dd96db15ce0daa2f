"""The plan of a merge, made from headers and configs alone: which tensor of which file is made from what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from relax_pipeline.errors import MergeError
from relax_pipeline.merge.adapter import AdapterFiles, open_adapter
from relax_pipeline.merge.base import Base, read_base
from relax_pipeline.merge.deltas import Delta
from relax_pipeline.merge.experts import pair_experts
from relax_pipeline.merge.fused import pair_fused
from relax_pipeline.merge.keys import parse_keys
from relax_pipeline.merge.outputs import Output
from relax_pipeline.merge.pairing import (
    Pairing,
    Parts,
    Sides,
    no_target,
    pair_embedding,
    pair_linear,
    pair_replacement,
)
from relax_pipeline.merge.weights import FLOAT_DTYPES, Weight, by_name, read_weights
from relax_pipeline.safetensors_io.header import Header


@dataclass(frozen=True)
class Shard:
    """One safetensors file to write."""

    file: str
    header: Header
    outputs: tuple[Output, ...]
    """In file order."""

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self.header.raw) + sum(tensor.num_bytes for tensor in self.header.tensors)


@dataclass(frozen=True)
class MergePlan:
    """Everything a merge will write."""

    base: Base
    adapter: AdapterFiles
    pairings: tuple[Pairing, ...]
    shards: tuple[Shard, ...]

    @property
    def num_bytes(self) -> int:
        """Size of all safetensors files of the result."""
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def changed(self) -> tuple[Output, ...]:
        """Outputs that are more than a copy."""
        return tuple(out for shard in self.shards for out in shard.outputs if out.is_changed)


def plan_merge(base: Path, adapter: Path) -> MergePlan:
    """Plan a merge; reads headers and configs, writes nothing.

    Args:
        base: Hugging Face checkpoint folder.
        adapter: PEFT LoRA folder, or a checkpoint folder with one inside.

    Raises:
        ModelError: The base is incomplete or damaged.
        AdapterError: The adapter is incomplete or of a kind that cannot be merged.
        MergeError: The two do not fit together.
    """
    opened_base, opened_adapter = read_base(base), open_adapter(adapter)
    weights = read_weights(opened_base)
    modules = parse_keys(opened_adapter.tensors)
    sides = Sides(opened_base, weights, opened_adapter)
    pairings = tuple(_pair(module, parts, sides) for module, parts in modules.items())
    _check_all_used(pairings, opened_adapter)
    deltas, replacements = _by_weight(pairings, weights)
    names = by_name(weights)
    shards = tuple(
        Shard(file, header, tuple(_output(names[info.name], deltas, replacements) for info in header.tensors))
        for file, header in opened_base.headers.items()
    )
    return MergePlan(opened_base, opened_adapter, pairings, shards)


def _pair(module: str, parts: Parts, sides: Sides) -> Pairing:
    if "whole" in parts:
        return pair_replacement(module, parts["whole"], sides)
    if "embedding_A" in parts:
        return pair_embedding(module, parts, sides)
    for pair in (pair_linear, pair_experts, pair_fused):
        pairing = pair(module, parts, sides)
        if pairing is not None:
            return pairing
    raise no_target(module)


def _by_weight(
    pairings: tuple[Pairing, ...], weights: Mapping[str, Weight]
) -> tuple[dict[str, tuple[Delta, ...]], dict[str, str]]:
    """Return base module to its deltas, and base module to the adapter tensor that replaces it."""
    deltas: dict[str, tuple[Delta, ...]] = {}
    replacements: dict[str, str] = {}
    for pairing in pairings:
        for target, added in pairing.deltas.items():
            if weights[target].tensor.dtype not in FLOAT_DTYPES:
                raise MergeError(
                    f"{weights[target].name} has dtype {weights[target].tensor.dtype}, nothing can be added"
                )
            deltas[target] = (*deltas.get(target, ()), *added)
        if pairing.replaces and pairing.replacement:
            replacements[pairing.replaces] = pairing.replacement
    for target in deltas.keys() & replacements.keys():
        raise MergeError(f"the adapter both replaces {target} and adds to it; keep one of the two")
    return deltas, replacements


def _output(weight: Weight, deltas: Mapping[str, tuple[Delta, ...]], replacements: Mapping[str, str]) -> Output:
    info = replace(weight.tensor, name=weight.name)
    return Output(info, weight, deltas.get(weight.module, ()), replacements.get(weight.module))


def _check_all_used(pairings: tuple[Pairing, ...], adapter: AdapterFiles) -> None:
    """Fail unless the pairings use each adapter tensor, and each whole one once."""
    used = {key for pairing in pairings for key in _keys(pairing)}
    unused = sorted(set(adapter.tensors) - used)
    if unused:
        raise MergeError(f"{len(unused)} adapter tensors would go unused, the first are {unused[:5]}")


def _keys(pairing: Pairing) -> set[str]:
    keys = {pairing.replacement} if pairing.replacement else set()
    for deltas in pairing.deltas.values():
        for delta in deltas:
            keys |= {delta.a_key, delta.b_key} | ({delta.magnitude} if delta.magnitude else set())
    return keys
