"""What each tensor of the merged checkpoint is made from, and its bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from relax_pipeline.errors import MergeError
from relax_pipeline.merge.compute import fold_chunks
from relax_pipeline.merge.deltas import Delta, load_factors
from relax_pipeline.merge.quantization.requantise import requantise
from relax_pipeline.merge.quantization.values import open_rows
from relax_pipeline.merge.weights import Weight
from relax_pipeline.safetensors_io.header import ITEM_BYTES, TensorInfo
from relax_pipeline.safetensors_io.read import TORCH_DTYPES, FileReader, read_tensor

COPY_BYTES = 1 << 22
Part = Literal["copy", "values", "codes", "scale", "zero_point", "replacement"]
"""copy: a base tensor's bytes. values: the weight plus its deltas, rounded to the output's dtype. codes, scale and
zero_point: the same, quantised again. replacement: a tensor of the adapter."""


@dataclass(frozen=True)
class Output:
    """One tensor to write."""

    info: TensorInfo
    """Name, dtype and shape to write."""
    part: Part
    original: TensorInfo
    """The base tensor it stands for."""
    source: Weight
    deltas: tuple[Delta, ...] = ()
    replacement: str = ""
    """Key of the adapter tensor that takes the weight's place."""

    @property
    def is_targeted(self) -> bool:
        """Whether it holds a weight that the adapter changes."""
        return self.part == "replacement" or (bool(self.deltas) and self.part in ("values", "codes"))

    @property
    def num_entries(self) -> int:
        """Values of the weight."""
        return math.prod(self.source.shape)


@dataclass
class Moved:
    """How many entries of one weight differ from the base's."""

    count: int = 0


def produce(output: Output, adapter: Mapping[str, torch.Tensor], moved: Moved) -> Iterator[torch.Tensor]:
    """Yield the bytes of one output tensor, in order, as uint8 chunks, each good until the next one is asked for.

    Args:
        output: What to make.
        adapter: The adapter's tensors.
        moved: Counts the entries that differ from the base, where the output is targeted.

    Raises:
        MergeError: A value is NaN or infinite.
    """
    if output.part == "copy":
        chunks = _copy(output.original)
    elif output.part == "replacement":
        chunks = _replace(output, adapter, moved)
    elif output.part == "values":
        chunks = _values(output, adapter, moved)
    else:
        chunks = _requantised(output, adapter, moved)
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
    low, high = torch.aminmax(values if values.element_size() > 1 else values.float())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise MergeError(
            f"{name} holds NaN or infinity; a model merged from it would be useless, so it was not written"
        )


def _copy(info: TensorInfo) -> Iterator[torch.Tensor]:
    dtype, item = TORCH_DTYPES[info.dtype], ITEM_BYTES[info.dtype]
    step = COPY_BYTES // item * item
    with FileReader(info.file) as reader:
        for start in range(0, info.num_bytes, step):
            yield reader.read(info.offset + start, min(step, info.num_bytes - start)).view(dtype)


def _folded(
    output: Output, adapter: Mapping[str, torch.Tensor], matrix: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (base values, new values in float32) of one matrix, in row chunks."""
    _, num_rows, num_columns = output.source.matrices
    factors = [part for delta in output.deltas if (part := load_factors(delta, adapter, matrix)) is not None]
    with open_rows(output.source, matrix) as read:
        yield from fold_chunks(read, shape=(num_rows, num_columns), factors=factors)


def _values(output: Output, adapter: Mapping[str, torch.Tensor], moved: Moved) -> Iterator[torch.Tensor]:
    dtype = TORCH_DTYPES[output.info.dtype]
    buffer = torch.empty(0, dtype=dtype)
    for matrix in range(output.source.matrices[0]):
        for old, new in _folded(output, adapter, matrix):
            buffer = torch.empty_like(new, dtype=dtype) if len(buffer) < len(new) else buffer
            rounded = buffer[: len(new)].copy_(new)
            if output.deltas:
                moved.count += count_different(old.to(dtype), rounded)
            yield rounded


def _requantised(output: Output, adapter: Mapping[str, torch.Tensor], moved: Moved) -> Iterator[torch.Tensor]:
    for matrix in range(output.source.matrices[0]):
        chunks = [(old, rows.clone()) for old, rows in _folded(output, adapter, matrix)]
        new = torch.cat([rows for _, rows in chunks])
        check_finite(new, output.info.name)
        quantized = requantise(new, output.source, matrix)
        if output.part == "codes":
            moved.count += count_different(torch.cat([old for old, _ in chunks]), quantized.values)
            yield quantized.codes
        elif output.part == "scale":
            yield quantized.scale
        else:
            assert quantized.zero_point is not None
            yield quantized.zero_point


def _replace(output: Output, adapter: Mapping[str, torch.Tensor], moved: Moved) -> Iterator[torch.Tensor]:
    dtype = TORCH_DTYPES[output.info.dtype]
    new = adapter[output.replacement].to(dtype)
    if output.source.scheme is None:
        moved.count += count_different(read_tensor(output.original), new)
    else:
        moved.count += new.numel()
    yield new


def count_different(old: torch.Tensor, new: torch.Tensor) -> int:
    """Return how many entries of two tensors of one dtype differ."""
    if old.element_size() == 2:  # numpy counts integers several times faster than torch
        return int(np.count_nonzero(old.view(torch.int16).numpy() != new.view(torch.int16).numpy()))
    return int(torch.count_nonzero(old != new))
