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


class FileReader:
    """One open file, read piece by piece into one buffer."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._stream = file.open("rb", buffering=0)
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def read(self, offset: int, length: int) -> torch.Tensor:
        """Return `length` bytes from `offset` on, as uint8, in a buffer that the next call fills again.

        Raises:
            ModelError: The file ends before that.
        """
        if len(self._buffer) < length:
            self._buffer = torch.empty(length, dtype=torch.uint8)
        data = self._buffer[:length]
        view, done = memoryview(data.numpy()), 0
        self._stream.seek(offset)
        while done < length:
            count = self._stream.readinto(view[done:])
            if not count:
                raise ModelError(
                    f"{self._file} ends at byte {offset + done}, expected {offset + length}: it was changed"
                )
            done += count
        return data


def read_bytes(file: Path, offset: int, length: int) -> torch.Tensor:
    """Return `length` bytes from `offset` on, as uint8.

    Raises:
        ModelError: The file ends before that.
    """
    with FileReader(file) as reader:
        return reader.read(offset, length)


def read_rows(reader: FileReader, info: TensorInfo, start: int, stop: int) -> torch.Tensor:
    """Return [start:stop] along the first dimension, in the tensor's dtype and in the reader's buffer."""
    row_shape = info.shape[1:]
    row_bytes = math.prod(row_shape) * ITEM_BYTES[info.dtype]
    data = reader.read(info.offset + start * row_bytes, (stop - start) * row_bytes)
    return data.view(TORCH_DTYPES[info.dtype]).reshape(stop - start, *row_shape)


def read_tensor(info: TensorInfo) -> torch.Tensor:
    """Return the whole tensor."""
    return read_bytes(info.file, info.offset, info.num_bytes).view(TORCH_DTYPES[info.dtype]).reshape(info.shape)
