"""The plan of a merge, made from headers and configs alone: which tensor of which file is made from what."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from relax_pipeline.errors import MergeError
from relax_pipeline.merge.adapter import AdapterFiles, open_adapter
from relax_pipeline.merge.base import CONFIG_FILE, INDEX_FILE, Base, read_base
from relax_pipeline.merge.changes import Changes, gather_changes
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
from relax_pipeline.merge.quantization.config import without_quantization
from relax_pipeline.merge.quantization.detect import read_weights
from relax_pipeline.merge.shards import Shard, plan_shards
from relax_pipeline.merge.tying import Tie, find_tie, untied
from relax_pipeline.merge.weights import Weight

Quantization = Literal["none", "kept", "dequantised to bfloat16"]


@dataclass(frozen=True)
class MergePlan:
    """Everything a merge will write."""

    base: Base
    adapter: AdapterFiles
    pairings: tuple[Pairing, ...]
    shards: tuple[Shard, ...]
    rewritten: Mapping[str, str]
    """Name to content of the JSON files that cannot stay as they are."""
    quantization: Quantization
    weights: Mapping[str, Weight]
    """By base module, the head of a tied base included."""

    @property
    def num_bytes(self) -> int:
        """Size of all safetensors files of the result."""
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def targeted(self) -> tuple[Output, ...]:
        """Outputs that hold a weight the adapter changes."""
        return tuple(output for shard in self.shards for output in shard.outputs if output.is_targeted)

    def table(self) -> list[tuple[str, ...]]:
        """Return the pairing as rows of text, the column titles first."""
        rows: list[tuple[str, ...]] = [
            ("adapter module", "kind", "rank", "scaling", "base tensor", "shape", "stored as", "file")
        ]
        for pairing in self.pairings:
            targets = [self.weights[module] for module in (*pairing.deltas, *filter(None, [pairing.replaces]))]
            more = f" and {len(targets) - 1} more" if len(targets) > 1 else ""
            first, shape = targets[0], "x".join(map(str, targets[0].shape))
            size = (str(pairing.rank), f"{pairing.scaling:g}") if pairing.rank else ("", "")
            stored = first.scheme.format if first.scheme else first.tensor.dtype
            rows.append((pairing.module, pairing.kind, *size, first.name + more, shape, stored, first.tensor.file.name))
        return rows


def plan_merge(base: Path, adapter: Path, *, keep_quantization: bool = False) -> MergePlan:
    """Plan a merge; reads headers and configs, writes nothing.

    Args:
        base: Hugging Face checkpoint folder.
        adapter: PEFT LoRA folder, or a checkpoint folder with one inside.
        keep_quantization: Quantise changed weights again; otherwise a quantised base becomes bfloat16.

    Raises:
        ModelError: The base is incomplete or damaged.
        AdapterError: The adapter is incomplete or of a kind that cannot be merged.
        MergeError: The two do not fit together.
    """
    opened_base, opened_adapter = read_base(base), open_adapter(adapter)
    weights = read_weights(opened_base)
    tie = find_tie(opened_base, weights)
    with_head = {**weights, tie.head.module: tie.head} if tie else weights
    sides = Sides(opened_base, with_head, opened_adapter)
    modules = parse_keys(opened_adapter.tensors)
    pairings = tuple(_pair(module, parts, sides) for module, parts in modules.items())
    _check_all_used(pairings, opened_adapter)
    changes = gather_changes(pairings, with_head, keep_quantization=keep_quantization)
    unties = tie is not None and _unties(tie, changes, sides)
    new_head = tie.head if tie and unties and not tie.head_is_stored else None
    if new_head and new_head.scheme and keep_quantization:
        raise MergeError(f"{new_head.tensor.name} is quantised and tied to the head; merge without --keep-quantization")
    shards = plan_shards(opened_base, weights, changes, keep_quantization=keep_quantization, new_head=new_head)
    quantized = any(weight.scheme for weight in weights.values())
    rewritten = _rewritten(opened_base, shards, dequantises=quantized and not keep_quantization, unties=unties)
    quantization: Quantization = "none" if not quantized else "kept" if keep_quantization else "dequantised to bfloat16"
    return MergePlan(opened_base, opened_adapter, pairings, shards, rewritten, quantization, with_head)


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


def _unties(tie: Tie, changes: Changes, sides: Sides) -> bool:
    """Return whether head and embedding come apart: one changes and the other does not, or both on their own."""
    embedding, head = changes.touch(tie.embedding), changes.touch(tie.head)
    return head or (embedding and not sides.adapter.config.ensure_weight_tying)


def _rewritten(base: Base, shards: tuple[Shard, ...], *, dequantises: bool, unties: bool) -> dict[str, str]:
    """Return the JSON files that must say something else than the base's."""
    files = {}
    if dequantises or unties:
        config = without_quantization(base.config) if dequantises else dict(base.config)
        files[CONFIG_FILE] = json.dumps(untied(config) if unties else config, indent=2) + "\n"
        if base.index is not None:
            total = sum(tensor.num_bytes for shard in shards for tensor in shard.header.tensors)
            weight_map = {tensor.name: shard.file for shard in shards for tensor in shard.header.tensors}
            index = {"metadata": {**base.index.get("metadata", {}), "total_size": total}, "weight_map": weight_map}
            files[INDEX_FILE] = json.dumps(index, indent=2) + "\n"
    return files


def _check_all_used(pairings: tuple[Pairing, ...], adapter: AdapterFiles) -> None:
    used = {key for pairing in pairings for key in pairing.keys}
    unused = sorted(set(adapter.tensors) - used)
    if unused:
        raise MergeError(f"{len(unused)} adapter tensors would go unused, the first are {unused[:5]}")
