"""Logical weights of a base: what a module multiplies with, however many tensors store it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from relax_pipeline.merge.base import Base
from relax_pipeline.safetensors_io.header import TensorInfo

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Weight:
    """One weight: a plain tensor, or a quantised one with its scales."""

    module: str
    """Name without .weight; the whole name for a bare parameter such as experts.gate_up_proj."""
    name: str
    """Name of the tensor when it is not quantised."""
    shape: tuple[int, ...]
    tensor: TensorInfo
    """The stored tensor, or the stored codes."""
    scheme: Literal["plain", "fp8", "int4"] = "plain"

    @property
    def matrices(self) -> tuple[int, int, int]:
        """(matrices, rows, columns) as stored: (1, out, in) for a linear layer, (experts, …) for packed experts."""
        if len(self.shape) == 3:
            return self.shape[0], self.shape[1], self.shape[2]
        return 1, self.shape[0], self.shape[1]


def read_weights(base: Base) -> dict[str, Weight]:
    """Return the base's weights by module name."""
    return {weight.module: weight for weight in map(_plain_weight, base.tensors.values())}


def _plain_weight(tensor: TensorInfo) -> Weight:
    return Weight(tensor.name.removesuffix(".weight"), tensor.name, tensor.shape, tensor)


def by_name(weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """Return the same weights by tensor name."""
    return {weight.name: weight for weight in weights.values()}
