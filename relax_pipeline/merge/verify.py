"""Check a merged folder against base and adapter from the files on disk, with other code than wrote it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from relax_pipeline.errors import MergeError
from relax_pipeline.merge.deltas import load_factors
from relax_pipeline.merge.outputs import Output
from relax_pipeline.merge.plan import MergePlan
from relax_pipeline.safetensors_io.header import TensorInfo, read_header
from relax_pipeline.safetensors_io.read import read_bytes, read_rows, read_tensor

SAMPLED_ROWS = 3
SAMPLED_MATRICES = 4
WINDOW_BYTES = 4096


def verify_merge(plan: MergePlan, folder: Path) -> int:
    """Recompute sampled rows of every changed tensor in float64, compare sampled bytes of every other one.

    Args:
        plan: What should have been written.
        folder: What was written.

    Returns:
        Number of rows recomputed.

    Raises:
        MergeError: The folder is not what the plan describes; names the tensor.
    """
    rows = 0
    for shard in plan.shards:
        written = {tensor.name: tensor for tensor in read_header(folder / shard.file).tensors}
        if list(written) != [output.info.name for output in shard.outputs]:
            raise MergeError(f"{folder / shard.file} does not hold the tensors that were planned for it")
        for output in shard.outputs:
            if output.deltas:
                rows += _verify_fold(output, written[output.info.name], plan.adapter.tensors)
            elif output.replacement:
                _verify_replacement(output, written[output.info.name], plan.adapter.tensors)
            else:
                _verify_copy(output, written[output.info.name])
    return rows


def _verify_fold(output: Output, written: TensorInfo, adapter: Mapping[str, torch.Tensor]) -> int:
    num_matrices, num_rows, _ = output.source.matrices
    checked = 0
    for matrix in _sample(output.info.name, num_matrices, SAMPLED_MATRICES):
        for row in _sample(f"{output.info.name}/{matrix}", num_rows, SAMPLED_ROWS):
            old = _matrix_row(output.source.tensor, output.source.matrices, matrix, row)
            new = _matrix_row(written, output.source.matrices, matrix, row)
            expected, magnitude = expected_row(output, adapter, matrix=matrix, row=row, old=old)
            unit = torch.finfo(new.dtype).eps / 2
            tolerance = unit * expected.abs() + 2**-20 * magnitude + torch.finfo(new.dtype).smallest_normal * unit
            if not bool(((new.double() - expected).abs() <= tolerance).all()):
                raise MergeError(f"{output.info.name}: row {row} of matrix {matrix} is not base + adapter on disk")
            checked += 1
    return checked


def expected_row(
    output: Output, adapter: Mapping[str, torch.Tensor], *, matrix: int, row: int, old: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one row of a changed weight in float64, and the sum of the magnitudes that were added up for it."""
    expected, magnitude = old.double(), old.double().abs()
    for delta in output.deltas:
        factors = load_factors(delta, adapter, matrix)
        rows = range(*factors.rows.indices(output.source.matrices[1])) if factors else range(0)
        if factors is None or row not in rows:
            continue
        left, right = factors.left[rows.index(row)].double(), factors.right.double()
        expected[factors.columns] += factors.scaling * (left @ right)
        magnitude[factors.columns] += abs(factors.scaling) * (left.abs() @ right.abs())
        if factors.magnitude is not None:
            factor = factors.magnitude[rows.index(row)].double() / torch.linalg.vector_norm(expected)
            expected, magnitude = expected * factor, magnitude * factor.abs() + expected.abs() * factor.abs()
    return expected, magnitude


def _verify_replacement(output: Output, written: TensorInfo, adapter: Mapping[str, torch.Tensor]) -> None:
    assert output.replacement is not None
    new = read_tensor(written)
    if not torch.equal(new, adapter[output.replacement].to(new.dtype)):
        raise MergeError(f"{output.info.name} is not the adapter's {output.replacement} on disk")


def _verify_copy(output: Output, written: TensorInfo) -> None:
    original = output.source.tensor
    length = min(WINDOW_BYTES, written.num_bytes)
    last = written.num_bytes - length
    for start in {0, *_sample(output.info.name, last, 1), last}:
        old = read_bytes(original.file, original.offset + start, length)
        if not torch.equal(old, read_bytes(written.file, written.offset + start, length)):
            raise MergeError(f"{output.info.name} is not the adapter's target, yet its bytes differ from the base")


def _matrix_row(info: TensorInfo, matrices: tuple[int, int, int], matrix: int, row: int) -> torch.Tensor:
    num_matrices, num_rows, num_columns = matrices
    flat = TensorInfo(info.name, info.dtype, (num_matrices * num_rows, num_columns), info.offset, info.file)
    index = matrix * num_rows + row
    return read_rows(flat, index, index + 1)[0]


def _sample(seed: str, size: int, count: int) -> Iterator[int]:
    """Yield up to `count` different indices below `size`, the same ones for the same seed."""
    if size <= count:
        yield from range(size)
        return
    start = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8]) % size
    yield from sorted({(start + step * size // count) % size for step in range(count)})
