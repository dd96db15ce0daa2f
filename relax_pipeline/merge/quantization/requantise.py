"""Float32 values back to codes and scales, one matrix at a time, in the scheme that the base has."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from relax_pipeline.merge.quantization.int4 import pack_int4
from relax_pipeline.merge.quantization.values import expand_blocks, read_scale, read_zero_point
from relax_pipeline.merge.weights import Scheme, Weight
from relax_pipeline.safetensors_io.read import TORCH_DTYPES

LOWEST, HIGHEST = -8, 7
"""Of 4-bit integers."""


@dataclass(frozen=True)
class Quantized:
    """One matrix in stored form."""

    codes: torch.Tensor
    scale: torch.Tensor
    """[row blocks, column blocks] in the stored dtype."""
    values: torch.Tensor
    """What the codes stand for, in float32."""
    zero_point: torch.Tensor | None = None
    """Packed."""


def requantise(values: torch.Tensor, weight: Weight, matrix: int) -> Quantized:
    """Quantise float32 values to a weight's own scheme.

    A block keeps the scale it has in the base while its values fit, so that what the delta left alone stays exactly
    as it was; a block that has outgrown its scale gets the smallest one that fits.

    Args:
        values: [rows, columns].
        weight: Quantised base weight, for its scheme and scales.
        matrix: Which of its matrices.
    """
    scheme = weight.scheme
    assert scheme is not None
    stored = read_scale(weight, scheme, matrix)
    low, high = _block_extremes(values, scheme.block)
    if scheme.format == "fp8":
        return _to_fp8(values, scheme, stored, torch.maximum(-low, high), TORCH_DTYPES[weight.tensor.dtype])
    return _to_int4(values, scheme, stored, low, high)


def _to_fp8(
    values: torch.Tensor, scheme: Scheme, stored: torch.Tensor, peak: torch.Tensor, dtype: torch.dtype
) -> Quantized:
    largest = torch.finfo(dtype).max
    smallest_scale = peak / largest
    if scheme.power_of_two:
        smallest_scale = torch.exp2(torch.ceil(torch.log2(smallest_scale)))
    scale = torch.where(peak <= stored.float() * largest, stored.float(), smallest_scale).to(stored.dtype)
    spread = _spread(scale, scheme, values)
    codes = (values / torch.where(spread == 0, 1.0, spread)).clamp(-largest, largest).to(dtype)
    return Quantized(codes, scale, codes.float() * spread)


def _to_int4(
    values: torch.Tensor, scheme: Scheme, stored: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> Quantized:
    old, old_zero = stored.float(), read_zero_point(scheme, stored.shape[0])
    zero = torch.zeros_like(old) if old_zero is None else old_zero
    fits = (low >= old * (LOWEST - 0.5 - zero)) & (high <= old * (HIGHEST + 0.5 - zero))
    if old_zero is None:
        smallest_scale, new_zero = torch.maximum(-low, high) / (HIGHEST + 0.5), zero
    else:
        low, high = low.clamp(max=0), high.clamp(min=0)
        smallest_scale = (high - low) / (HIGHEST - LOWEST)
        new_zero = (LOWEST - low / smallest_scale).round().clamp(LOWEST, HIGHEST)
    scale, zero = torch.where(fits, old, smallest_scale).to(stored.dtype), torch.where(fits, zero, new_zero)
    spread, shift = _spread(scale, scheme, values), _spread(zero, scheme, values)
    codes = (values / torch.where(spread == 0, 1.0, spread) + shift).round().clamp(LOWEST, HIGHEST)
    packed_zero = None if old_zero is None else pack_int4(zero.to(torch.int8).T).T.contiguous()
    return Quantized(pack_int4(codes.to(torch.int8)), scale, (codes - shift) * spread, packed_zero)


def _spread(grid: torch.Tensor, scheme: Scheme, values: torch.Tensor) -> torch.Tensor:
    return expand_blocks(grid.float(), scheme.block, range(values.shape[0]), values.shape[1])


def _block_extremes(values: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lowest and highest value of each block; blocks at the edge may be smaller."""
    rows, columns = values.shape
    grid = math.ceil(rows / block[0]), math.ceil(columns / block[1])
    padding = (0, grid[1] * block[1] - columns, 0, grid[0] * block[0] - rows)

    def blocks(fill: float) -> torch.Tensor:
        padded = torch.nn.functional.pad(values, padding, value=fill)
        return padded.view(grid[0], block[0], grid[1], block[1])

    return blocks(math.inf).amin(dim=(1, 3)), blocks(-math.inf).amax(dim=(1, 3))
