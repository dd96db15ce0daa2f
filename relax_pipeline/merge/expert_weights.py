"""How a base stores the routed experts of one layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from relax_pipeline.merge.layout import PROJECTIONS, Projection, packed_experts_transposed
from relax_pipeline.merge.names import EXPERT_LEAVES, aliases
from relax_pipeline.merge.pairing import Sides
from relax_pipeline.merge.weights import Weight


@dataclass(frozen=True)
class ExpertWeights:
    """How the base stores the experts of one layer."""

    parent: str
    packed: Mapping[Projection, Weight]
    """Leaf to 3-D weight."""
    apart: Mapping[Projection, tuple[Weight, ...]]
    """Leaf to one 2-D weight an expert."""
    transposed: bool
    """Packed ones are stored [experts, in, out]."""

    @property
    def num_experts(self) -> int:
        """Experts of the layer."""
        packed = [weight.shape[0] for weight in self.packed.values()]
        return packed[0] if packed else len(next(iter(self.apart.values())))

    def features(self, projection: Projection) -> tuple[int, int] | None:
        """Return (in, out) of a projection, or None where the base has no such thing."""
        if projection in self.apart:
            rows, columns = self.apart[projection][0].shape
            return columns, rows
        if projection in self.packed:
            _, rows, columns = self.packed[projection].shape
            return (rows, columns) if self.transposed else (columns, rows)
        if projection == "gate_up_proj":
            gate, up = self.features("gate_proj"), self.features("up_proj")
            return (gate[0], gate[1] + up[1]) if gate and up else None
        fused = self.packed.get("gate_up_proj") and self.features("gate_up_proj")
        return (fused[0], fused[1] // 2) if fused and projection != "down_proj" else None


def find_experts(parent: str, sides: Sides) -> ExpertWeights | None:
    """Return the experts of one layer, by any name that layer may have, or None where the base has no such layer.

    Raises:
        MergeError: They are packed, and config and shapes do not tell their orientation.
    """
    for name in aliases(parent):
        packed = {leaf: weight for leaf in PROJECTIONS if (weight := sides.weights.get(f"{name}.{leaf}"))}
        apart = {leaf: found for leaf in PROJECTIONS if (found := _experts_apart(name, leaf, sides))}
        if packed:
            shapes = {leaf: weight.shape for leaf, weight in packed.items()}
            return ExpertWeights(name, packed, {}, packed_experts_transposed(sides.base, name, shapes))
        if apart:
            return ExpertWeights(name, {}, apart, transposed=False)
    return None


def _experts_apart(parent: str, leaf: str, sides: Sides) -> tuple[Weight, ...]:
    spellings = (leaf, dict(EXPERT_LEAVES).get(leaf, leaf))
    found: list[Weight] = []
    while (
        name := next((n for s in spellings if (n := f"{parent}.{len(found)}.{s}") in sides.weights), None)
    ) is not None:
        found.append(sides.weights[name])
    return tuple(found)
