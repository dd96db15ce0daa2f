"""One low-rank change to one weight: which adapter tensors make it and where in the weight it goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

Stacking = Literal["none", "stacked", "flat"]
"""none: A [R, I]. stacked: A [E, R, I], B [E, O, R]. flat (peft's target_parameters): A [E*R, I], expert-major;
B [O, R*E], expert-minor."""


@dataclass(frozen=True)
class Delta:
    """scaling * B @ A, and where it goes."""

    module: str
    """The adapter's own name for what it adapts."""
    a_key: str
    b_key: str
    scaling: float
    stacking: Stacking = "none"
    num_experts: int = 1
    """Experts that the adapter tensors hold."""
    source_expert: int | None = None
    """The one expert of the adapter to take; None: the one with the matrix's own index."""
    target_expert: int | None = None
    """The one matrix of the weight to change; None: all."""
    swapped: bool = False
    """A runs over outputs and B over inputs: embeddings, and packed experts of peft before 0.19."""
    source_rows: slice | None = None
    """Output rows of the adapter to take, where the adapter is fused and the base is not."""
    target_rows: slice | None = None
    """Output rows of the weight to change, where the base is fused and the adapter is not."""
    transposed: bool = False
    """The weight is stored [in, out]."""
    magnitude: str | None = None
    """DoRA: key of the norm each output row is brought to, [O]."""

    def overlaps(self, other: Delta) -> bool:
        """Whether the two may change the same entry of one weight."""
        same_expert = self.target_expert is None or other.target_expert in (None, self.target_expert)
        return same_expert and (None in (self.target_rows, other.target_rows) or self.target_rows == other.target_rows)


@dataclass(frozen=True)
class Factors:
    """The change to one stored matrix: W[rows, columns] += scaling * left @ right, in float32."""

    left: torch.Tensor
    """[rows, R]"""
    right: torch.Tensor
    """[R, columns]"""
    scaling: float
    rows: slice = slice(None)
    columns: slice = slice(None)
    magnitude: torch.Tensor | None = None
    """[rows]"""


def load_factors(delta: Delta, adapter: Mapping[str, torch.Tensor], matrix: int) -> Factors | None:
    """Return what one delta changes in one matrix of its weight, or None where it leaves that matrix alone."""
    if delta.target_expert not in (None, matrix):
        return None
    expert = matrix if delta.source_expert is None else delta.source_expert
    A_RI, B_OR = _take_expert(delta, adapter, expert)
    if delta.swapped:
        A_RI, B_OR = B_OR.T, A_RI.T
    A_RI, B_OR = A_RI.float(), B_OR.float()
    if delta.source_rows is not None:
        B_OR = B_OR[delta.source_rows]
    region = delta.target_rows or slice(None)
    if delta.transposed:
        return Factors(A_RI.T, B_OR.T, delta.scaling, columns=region)
    magnitude = adapter[delta.magnitude].float() if delta.magnitude else None
    return Factors(B_OR, A_RI, delta.scaling, rows=region, magnitude=magnitude)


def _take_expert(delta: Delta, adapter: Mapping[str, torch.Tensor], expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    A, B = adapter[delta.a_key], adapter[delta.b_key]
    if delta.stacking == "stacked":
        return A[expert], B[expert]
    if delta.stacking == "flat":
        return (
            A.reshape(delta.num_experts, -1, A.shape[1])[expert],
            B.reshape(B.shape[0], -1, delta.num_experts)[..., expert],
        )
    return A, B
