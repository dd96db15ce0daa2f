"""Check a merged folder against base and adapter from the files on disk, in float64."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from relax_pipeline.errors import MergeError
from relax_pipeline.merge.deltas import Factors, load_factors
from relax_pipeline.merge.outputs import Output
from relax_pipeline.merge.plan import MergePlan
from relax_pipeline.merge.pool import worker_pool
from relax_pipeline.merge.quantization.values import open_rows, rounding_step
from relax_pipeline.merge.shards import Shard
from relax_pipeline.merge.weights import Weight
from relax_pipeline.safetensors_io.header import TensorInfo, read_header
from relax_pipeline.safetensors_io.read import read_bytes, read_tensor

SAMPLED_ROWS = 3
SAMPLED_MATRICES = 4
WINDOW_BYTES = 4096
FLOAT32_SLACK = 2**-20
"""Share of the summed magnitudes that float32 accumulation may be off by."""


def verify_merge(plan: MergePlan, folder: Path) -> int:
    """Recompute sampled rows of every changed weight, compare sampled bytes of every tensor that must be unchanged.

    Args:
        plan: What should have been written.
        folder: What was written.

    Returns:
        Number of rows recomputed.

    Raises:
        MergeError: The folder is not what the plan describes; names the tensor.
    """
    headers = {shard.file: read_header(folder / shard.file) for shard in plan.shards}
    written = {tensor.name: tensor for header in headers.values() for tensor in header.tensors}

    def verify_shard(shard: Shard) -> int:
        if [tensor.name for tensor in headers[shard.file].tensors] != [output.info.name for output in shard.outputs]:
            raise MergeError(f"{folder / shard.file} does not hold the tensors that were planned for it")
        return sum(_verify_output(output, written, plan.adapter.tensors) for output in shard.outputs)

    with worker_pool() as pool:
        return sum(pool.map(verify_shard, plan.shards))


def _verify_output(output: Output, written: Mapping[str, TensorInfo], adapter: Mapping[str, torch.Tensor]) -> int:
    """Check one tensor; return how many rows were recomputed."""
    if output.part in ("values", "codes"):
        return _verify_weight(output, written, adapter)
    if output.part == "replacement":
        _verify_replacement(output, written[output.info.name], adapter)
    elif output.part == "copy":
        _verify_copy(output, written[output.info.name])
    return 0


def _verify_weight(output: Output, written: Mapping[str, TensorInfo], adapter: Mapping[str, torch.Tensor]) -> int:
    num_matrices, num_rows, _ = output.source.matrices
    result = _written_weight(output, written)
    checked = 0
    for matrix in _sample(output.info.name, num_matrices, SAMPLED_MATRICES):
        factors = [part for delta in output.deltas if (part := load_factors(delta, adapter, matrix)) is not None]
        with open_rows(output.source, matrix) as old, open_rows(result, matrix) as new:
            for row in _sample(f"{output.info.name}/{matrix}", num_rows, SAMPLED_ROWS):
                expected, magnitude = expected_row(old(row, row + 1)[0], factors, row=row, num_rows=num_rows)
                tolerance = rounding_step(result, matrix, row, expected) + FLOAT32_SLACK * magnitude
                if not bool(((new(row, row + 1)[0].double() - expected).abs() <= tolerance).all()):
                    raise MergeError(f"{output.info.name}: row {row} of matrix {matrix} is not base + adapter on disk")
                checked += 1
    return checked


def expected_row(
    old: torch.Tensor, factors: Iterable[Factors], *, row: int, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one row of a changed weight in float64, and the sum of the magnitudes that were added up for it."""
    expected, magnitude = old.double(), old.double().abs()
    for factor in factors:
        rows = range(*factor.rows.indices(num_rows))
        if row not in rows:
            continue
        index = rows.index(row)
        left, right = factor.left[index].double(), factor.right.double()
        expected[factor.columns] += factor.scaling * (left @ right)
        magnitude[factor.columns] += abs(factor.scaling) * (left.abs() @ right.abs())
        if factor.magnitude is not None:
            stretch = factor.magnitude[index].double() / torch.linalg.vector_norm(expected)
            expected, magnitude = expected * stretch, (magnitude + expected.abs()) * stretch.abs()
    return expected, magnitude


def _written_weight(output: Output, written: Mapping[str, TensorInfo]) -> Weight:
    """Return the weight as it lies in the new files."""
    tensor, scheme = written[output.info.name], output.source.scheme
    if output.part == "values" or scheme is None:
        return replace(output.source, tensor=tensor, scheme=None)
    zero_point = written[scheme.zero_point.name] if scheme.zero_point else None
    new_scheme = replace(scheme, scale=written[scheme.scale.name], zero_point=zero_point)
    return replace(output.source, tensor=tensor, scheme=new_scheme)


def _verify_replacement(output: Output, written: TensorInfo, adapter: Mapping[str, torch.Tensor]) -> None:
    new = read_tensor(written)
    if not torch.equal(new, adapter[output.replacement].to(new.dtype)):
        raise MergeError(f"{output.info.name} is not the adapter's {output.replacement} on disk")


def _verify_copy(output: Output, written: TensorInfo) -> None:
    original = output.original
    length = min(WINDOW_BYTES, written.num_bytes)
    last = written.num_bytes - length
    for start in {0, *_sample(output.info.name, last, 1), last}:
        old = read_bytes(original.file, original.offset + start, length)
        if not torch.equal(old, read_bytes(written.file, written.offset + start, length)):
            raise MergeError(f"{output.info.name} is no target of the adapter, yet its bytes differ from the base's")


def _sample(seed: str, size: int, count: int) -> Iterator[int]:
    """Yield up to `count` different indices below `size`, the same ones for the same seed."""
    if size <= count:
        yield from range(size)
        return
    start = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8]) % size
    yield from sorted({(start + step * size // count) % size for step in range(count)})
