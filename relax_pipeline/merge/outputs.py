"""What each tensor of the merged checkpoint is made from, and its bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from relax_pipeline.errors import MergeError
from relax_pipeline.merge.compute import fold_chunks
from relax_pipeline.merge.deltas import Delta, load_factors
from relax_pipeline.merge.weights import FLOAT_DTYPES, Weight
from relax_pipeline.safetensors_io.header import ITEM_BYTES, TensorInfo
from relax_pipeline.safetensors_io.read import TORCH_DTYPES, read_bytes, read_rows

COPY_BYTES = 1 << 22


@dataclass(frozen=True)
class Output:
    """One tensor to write: a base tensor as it is, a weight with deltas, or a tensor of the adapter."""

    info: TensorInfo
    """Name, dtype and shape to write."""
    source: Weight
    deltas: tuple[Delta, ...] = ()
    replacement: str | None = None
    """Key of the adapter tensor that takes the weight's place."""

    @property
    def is_changed(self) -> bool:
        """Whether it is more than a copy."""
        return bool(self.deltas or self.replacement)

    @property
    def num_entries(self) -> int:
        """Values it holds."""
        return math.prod(self.info.shape)


@dataclass
class Moved:
    """How many entries of one tensor differ from the base's."""

    count: int = 0


def produce(output: Output, adapter: Mapping[str, torch.Tensor], moved: Moved) -> Iterator[torch.Tensor]:
    """Yield the bytes of one output tensor, in order, as uint8 chunks.

    Args:
        output: What to make.
        adapter: The adapter's tensors.
        moved: Counts the entries that differ from the base, where the output is not a plain copy.

    Raises:
        MergeError: A value is NaN or infinite.
    """
    if output.replacement is not None:
        chunks = _replace(output, adapter, moved)
    elif output.deltas:
        chunks = _fold(output, adapter, moved)
    else:
        chunks = _copy(output.source.tensor)
    for chunk in chunks:
        check_finite(chunk, output.info.name)
        yield chunk.contiguous().view(-1).view(torch.uint8)


def check_finite(values: torch.Tensor, name: str) -> None:
    """Raise if any value of a float tensor is NaN or infinite.

    Raises:
        MergeError: With the tensor's name.
    """
    if not values.is_floating_point() or not values.numel():
        return
    wide = values if values.element_size() > 1 else values.float()
    low, high = torch.aminmax(wide)
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise MergeError(f"{name} holds NaN or infinity; a merged model would answer nonsense, so nothing was written")


def _copy(info: TensorInfo) -> Iterator[torch.Tensor]:
    dtype, item = TORCH_DTYPES[info.dtype], ITEM_BYTES[info.dtype]
    step = COPY_BYTES // item * item
    for start in range(0, info.num_bytes, step):
        yield read_bytes(info.file, info.offset + start, min(step, info.num_bytes - start)).view(dtype)


def _fold(output: Output, adapter: Mapping[str, torch.Tensor], moved: Moved) -> Iterator[torch.Tensor]:
    weight, dtype = output.source, TORCH_DTYPES[output.info.dtype]
    num_matrices, num_rows, num_columns = weight.matrices
    for matrix in range(num_matrices):
        factors = [part for delta in output.deltas if (part := load_factors(delta, adapter, matrix)) is not None]
        first = matrix * num_rows

        def read(start: int, stop: int, first: int = first) -> torch.Tensor:
            flat = TensorInfo(
                "",
                weight.tensor.dtype,
                (num_matrices * num_rows, num_columns),
                weight.tensor.offset,
                weight.tensor.file,
            )
            return read_rows(flat, first + start, first + stop)

        for old, new in fold_chunks(read, shape=(num_rows, num_columns), factors=factors):
            rounded = new.to(dtype)
            moved.count += count_different(old, rounded)
            yield rounded


def _replace(output: Output, adapter: Mapping[str, torch.Tensor], moved: Moved) -> Iterator[torch.Tensor]:
    assert output.replacement is not None
    new = adapter[output.replacement].to(TORCH_DTYPES[output.info.dtype])
    if output.source.tensor.dtype in FLOAT_DTYPES:
        old = torch.cat([chunk.view(-1) for chunk in _copy(output.source.tensor)])
        moved.count += count_different(old, new.view(-1))
    yield new


def count_different(old: torch.Tensor, new: torch.Tensor) -> int:
    """Return how many entries of two tensors of one dtype differ in value."""
    if old.element_size() == 2:  # numpy counts integers several times faster than torch
        return int(np.count_nonzero(old.view(torch.int16).numpy() != new.view(torch.int16).numpy()))
    return int(torch.count_nonzero(old != new))
