"""Read tensors, or rows of them, with plain reads: no memory map that would count as resident."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from relax_pipeline.errors import ModelError
from relax_pipeline.safetensors_io.header import ITEM_BYTES, TensorInfo

TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def read_bytes(file: Path, offset: int, length: int) -> torch.Tensor:
    """Return `length` bytes from `offset` on, as uint8.

    Raises:
        ModelError: The file ends before that.
    """
    data = torch.empty(length, dtype=torch.uint8)
    view, done = memoryview(data.numpy()), 0
    with file.open("rb", buffering=0) as stream:
        stream.seek(offset)
        while done < length:
            count = stream.readinto(view[done:])
            if not count:
                raise ModelError(f"{file} ends at byte {offset + done}, expected {offset + length}: it was changed")
            done += count
    return data


def read_rows(info: TensorInfo, start: int, stop: int) -> torch.Tensor:
    """Return [start:stop] along the first dimension, in the tensor's dtype."""
    row_shape = info.shape[1:]
    row_bytes = math.prod(row_shape) * ITEM_BYTES[info.dtype]
    data = read_bytes(info.file, info.offset + start * row_bytes, (stop - start) * row_bytes)
    return data.view(TORCH_DTYPES[info.dtype]).reshape(stop - start, *row_shape)


def read_tensor(info: TensorInfo) -> torch.Tensor:
    """Return the whole tensor."""
    return read_bytes(info.file, info.offset, info.num_bytes).view(TORCH_DTYPES[info.dtype]).reshape(info.shape)
