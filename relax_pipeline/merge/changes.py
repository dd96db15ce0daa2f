"""What an adapter does to a base, gathered by weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from relax_pipeline.errors import MergeError
from relax_pipeline.merge.deltas import Delta
from relax_pipeline.merge.pairing import Pairing
from relax_pipeline.merge.weights import Weight


@dataclass(frozen=True)
class Changes:
    """What the adapter does to the base, by base module."""

    deltas: Mapping[str, tuple[Delta, ...]]
    replacements: Mapping[str, str]
    """Module to the adapter tensor that takes its place."""

    def touch(self, weight: Weight) -> bool:
        """Whether a weight is changed."""
        return weight.module in self.deltas or weight.module in self.replacements


def gather_changes(pairings: tuple[Pairing, ...], weights: Mapping[str, Weight], *, keep_quantization: bool) -> Changes:
    """Gather what the pairings do by base module.

    Raises:
        MergeError: Two of them change the same part of a weight, or a weight cannot be changed that way.
    """
    deltas: dict[str, list[Delta]] = {}
    replacements: dict[str, str] = {}
    for pairing in pairings:
        for target, added in pairing.deltas.items():
            deltas.setdefault(target, []).extend(added)
        if pairing.replaces:
            if pairing.replaces in replacements:
                raise MergeError(f"two adapter tensors replace {pairing.replaces}; keep one")
            replacements[pairing.replaces] = pairing.replacement
    for target, found in deltas.items():
        weight = weights[target]
        if not weight.is_addable:
            raise MergeError(
                f"{weight.name} is {weight.tensor.dtype}{list(weight.shape)}: no LoRA delta can be added to it"
            )
        for one, other in combinations(found, 2):
            if one.overlaps(other):
                raise MergeError(f"adapter modules {one.module} and {other.module} both change {target}; keep one")
    for target, key in replacements.items():
        if target in deltas:
            raise MergeError(f"the adapter both replaces {target} and adds to it; keep one of the two")
        if keep_quantization and weights[target].scheme:
            raise MergeError(f"{key} replaces quantised {target}; merge without --keep-quantization")
    return Changes({target: tuple(found) for target, found in deltas.items()}, replacements)
