"""Logical weights of a base: what a module multiplies with, however many tensors store it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from relax_pipeline.safetensors_io.header import TensorInfo

FLOAT_DTYPES = ("F32", "F16", "BF16")
"""What a delta can be added to."""


@dataclass(frozen=True)
class Scheme:
    """How one quantised weight is stored: value = (code - zero_point) * scale of its block."""

    format: Literal["fp8", "int4"]
    block: tuple[int, int]
    """Rows and columns that share a scale; the last block of a row or column may be smaller."""
    scale: TensorInfo
    zero_point: TensorInfo | None = None
    """Packed along rows, eight in an int32."""
    power_of_two: bool = False
    """Scales may only be powers of two."""
    activation_scales: tuple[TensorInfo, ...] = ()
    """Meaningless once the weight is not quantised."""
    shape: TensorInfo | None = None
    """Tensor that holds the unpacked shape."""

    @property
    def companions(self) -> tuple[TensorInfo, ...]:
        """All tensors beside the codes."""
        optional = (self.zero_point, self.shape, *self.activation_scales)
        return (self.scale, *(tensor for tensor in optional if tensor is not None))


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
    scheme: Scheme | None = None

    @property
    def matrices(self) -> tuple[int, int, int]:
        """(matrices, rows, columns) as stored: (1, out, in) for a linear layer, (experts, …) for packed experts."""
        if len(self.shape) == 3:
            return self.shape[0], self.shape[1], self.shape[2]
        return 1, self.shape[0], self.shape[1]

    @property
    def stored(self) -> tuple[TensorInfo, ...]:
        """All tensors it is stored in."""
        return (self.tensor, *(self.scheme.companions if self.scheme else ()))

    @property
    def is_addable(self) -> bool:
        """Whether a delta can be added to its values."""
        return len(self.shape) in (2, 3) and (self.scheme is not None or self.tensor.dtype in FLOAT_DTYPES)


def plain_weight(tensor: TensorInfo) -> Weight:
    """Return the weight that one unquantised tensor is."""
    return Weight(tensor.name.removesuffix(".weight"), tensor.name, tensor.shape, tensor)
