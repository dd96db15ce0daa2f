"""Read any weight as values, and say how exactly they are stored."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from relax_pipeline.merge.compute import ReadRows
from relax_pipeline.merge.quantization.int4 import unpack_int4
from relax_pipeline.merge.weights import Scheme, Weight
from relax_pipeline.safetensors_io.header import TensorInfo
from relax_pipeline.safetensors_io.read import TORCH_DTYPES, FileReader, read_rows, read_tensor


@contextmanager
def open_rows(weight: Weight, matrix: int) -> Iterator[ReadRows]:
    """Yield a function that reads rows of one matrix of a weight: as stored, or dequantised to float32.

    Plain rows lie in a buffer that the next call fills again.
    """
    _, num_rows, num_columns = weight.matrices
    first, scheme, codes = matrix * num_rows, weight.scheme, _flat(weight.tensor)
    with FileReader(weight.tensor.file) as reader:
        if scheme is None:
            yield lambda start, stop: read_rows(reader, codes, first + start, first + stop)
            return
        scale = read_scale(weight, scheme, matrix).float()
        zero_point = read_zero_point(scheme, scale.shape[0])

        def read(start: int, stop: int) -> torch.Tensor:
            stored = read_rows(reader, codes, first + start, first + stop)
            values = unpack_int4(stored, num_columns).float() if scheme.format == "int4" else stored.float()
            if zero_point is not None:
                values -= expand_blocks(zero_point, scheme.block, range(start, stop), num_columns)
            return values * expand_blocks(scale, scheme.block, range(start, stop), num_columns)

        yield read


def expand_blocks(grid: torch.Tensor, block: tuple[int, int], rows: range, num_columns: int) -> torch.Tensor:
    """Return the block value of each entry of some rows: [len(rows), num_columns]."""
    by_row = grid[torch.arange(rows.start, rows.stop) // block[0]]
    return by_row.repeat_interleave(block[1], dim=1)[:, :num_columns]


def read_scale(weight: Weight, scheme: Scheme, matrix: int) -> torch.Tensor:
    """Return the scales of one matrix, [row blocks, column blocks], in the stored dtype."""
    num_matrices, rows, columns = weight.matrices
    grid = math.ceil(rows / scheme.block[0]), math.ceil(columns / scheme.block[1])
    return read_tensor(scheme.scale).reshape(num_matrices, *grid)[matrix]


def read_zero_point(scheme: Scheme, row_blocks: int) -> torch.Tensor | None:
    """Return the zero points, [row blocks, column blocks] in float32, where the scheme has them."""
    if scheme.zero_point is None:
        return None
    return unpack_int4(read_tensor(scheme.zero_point).T.contiguous(), row_blocks).T.float()


def rounding_step(weight: Weight, matrix: int, row: int, values: torch.Tensor) -> torch.Tensor:
    """Return how far each entry of one stored row may lie from the exact values that it was rounded from.

    Args:
        weight: As written.
        matrix: Which of its matrices.
        row: Which row.
        values: The exact ones in float64, [columns].
    """
    scheme = weight.scheme
    if scheme is None:
        info = torch.finfo(TORCH_DTYPES[weight.tensor.dtype])
        return (values.abs() + info.smallest_normal) * info.eps / 2
    grid = read_scale(weight, scheme, matrix).float().double()
    scale = expand_blocks(grid, scheme.block, range(row, row + 1), values.shape[-1])[0]
    scale_rounding = torch.finfo(TORCH_DTYPES[scheme.scale.dtype]).eps * values.abs()
    if scheme.format == "int4":
        return scale / 2 + scale_rounding
    info = torch.finfo(TORCH_DTYPES[weight.tensor.dtype])
    return (values.abs() + scale * info.smallest_normal) * info.eps / 2 + scale_rounding


def _flat(info: TensorInfo) -> TensorInfo:
    """Return a tensor as [rows of all matrices, columns]."""
    return replace(info, shape=(math.prod(info.shape[:-1]), info.shape[-1]))
