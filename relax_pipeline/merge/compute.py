"""The arithmetic of a merge: float32 accumulation in chunks that fit the processor's cache, one rounding at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from relax_pipeline.merge.deltas import Factors

CHUNK_ELEMENTS = 1 << 18
"""1 MiB of float32: three such buffers stay in the cache of one core."""
READ_CHUNKS = 4
"""Chunks read at once."""

ReadRows = Callable[[int, int], torch.Tensor]


def fold_chunks(
    read_rows: ReadRows, *, shape: tuple[int, int], factors: Sequence[Factors]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (old rows as read, new rows in float32) of one matrix, top to bottom.

    The new rows are one buffer, used again for the next chunk.

    Args:
        read_rows: Returns rows [start:stop] in any float dtype.
        shape: (rows, columns) of the matrix as stored.
        factors: What to add; regions may overlap.
    """
    num_rows, num_columns = shape
    step = max(1, CHUNK_ELEMENTS // max(1, num_columns))
    buffer, scratch = torch.empty(2, min(step, num_rows), num_columns)
    for first in range(0, num_rows, step * READ_CHUNKS):
        start = first
        rows = read_rows(first, min(first + step * READ_CHUNKS, num_rows))
        for old in torch.split(rows, step):
            new = buffer[: len(old)].copy_(old)
            for factor in factors:
                add_delta(new, start, factor, num_rows, scratch)
            start += len(old)
            yield old, new


def add_delta(rows: torch.Tensor, first_row: int, factors: Factors, num_rows: int, scratch: torch.Tensor) -> None:
    """Add scaling * left @ right to the rows [first_row:first_row+len(rows)] of a matrix, in place.

    Memory that is new for each chunk costs more than the arithmetic, so the product goes into `scratch`, which holds
    at least as many values as the rows.
    """
    start, stop, step = factors.rows.indices(num_rows)
    last_row = min(first_row + len(rows), stop)
    low = max(0, -((start - first_row) // step))
    high = max(low, -((start - last_row) // step))
    if low == high:
        return
    target = rows[start + low * step - first_row : last_row - first_row : step, factors.columns]
    product = scratch.view(-1)[: target.numel()].view(target.shape)
    target.add_(torch.mm(factors.left[low:high], factors.right, out=product), alpha=factors.scaling)
    if factors.magnitude is not None:
        norms = torch.linalg.vector_norm(target, dim=1)
        target.mul_((factors.magnitude[low:high] / norms).unsqueeze(1))
