"""The header of a safetensors file: what it holds and where, read and written without touching the tensors.

Source of the layout: https://github.com/huggingface/safetensors#format (8 bytes little-endian length, JSON, data).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from relax_pipeline.errors import ModelError

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies."""

    name: str
    dtype: str
    """Safetensors name, e.g. BF16."""
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the file; 0 until it is placed."""
    file: Path = Path()

    @property
    def num_bytes(self) -> int:
        """Bytes it takes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Header:
    """The content of one file, in file order."""

    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]
    raw: bytes
    """Length field and JSON as they stand in the file."""


def read_header(file: Path) -> Header:
    """Read a file's header and check that the file holds exactly the bytes it promises.

    Raises:
        ModelError: No safetensors file, a dtype this software does not know, or a truncated or damaged file.
    """
    try:
        with file.open("rb") as stream:
            prefix = stream.read(8)
            (length,) = struct.unpack("<Q", prefix)
            size = file.stat().st_size
            if length > size:
                raise ModelError(f"{file} is no whole safetensors file: its header alone has {length} of {size} bytes")
            text = stream.read(length)
        entries: dict[str, Any] = json.loads(text)
    except (ValueError, struct.error) as error:
        raise ModelError(f"{file} is no safetensors file: {error}") from error
    metadata = entries.pop("__metadata__", {})
    data_start = 8 + length
    tensors = sorted((_tensor_info(file, name, entry, data_start) for name, entry in entries.items()), key=_file_order)
    _check_extent(file, tensors, data_start, size)
    return Header(tuple(tensors), metadata, prefix + text)


def folder_tensors(folder: Path) -> Iterator[TensorInfo]:
    """Yield what all safetensors files of a folder hold; raises as `read_header`."""
    for file in sorted(folder.glob("*.safetensors")):
        yield from read_header(file).tensors


def build_header(tensors: Iterable[TensorInfo], metadata: Mapping[str, str]) -> Header:
    """Lay tensors out in a new file: wide dtypes first, so that each is aligned to its own item size.

    The offsets and files of the tensors given are ignored; `file` stays empty in the result.
    """
    ordered = sorted(tensors, key=lambda tensor: (-ITEM_BYTES[tensor.dtype], tensor.name))
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position, starts = 0, []
    for tensor in ordered:
        starts.append(position)
        end = position + tensor.num_bytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    raw = struct.pack("<Q", len(text)) + text
    placed = (
        replace(tensor, offset=len(raw) + start, file=Path()) for tensor, start in zip(ordered, starts, strict=True)
    )
    return Header(tuple(placed), metadata, raw)


def _tensor_info(file: Path, name: str, entry: Mapping[str, Any], data_start: int) -> TensorInfo:
    if entry["dtype"] not in ITEM_BYTES:
        raise ModelError(f"{file}: tensor {name} has dtype {entry['dtype']}, known are {', '.join(ITEM_BYTES)}")
    start, end = entry["data_offsets"]
    info = TensorInfo(name, entry["dtype"], tuple(entry["shape"]), data_start + start, file)
    if end - start != info.num_bytes:
        raise ModelError(f"{file}: tensor {name} {info.dtype}{list(info.shape)} lies in {end - start} bytes")
    return info


def _file_order(tensor: TensorInfo) -> tuple[int, int, str]:
    return tensor.offset, tensor.num_bytes, tensor.name


def _check_extent(file: Path, tensors: Iterable[TensorInfo], data_start: int, size: int) -> None:
    position = data_start
    for tensor in tensors:
        if tensor.offset != position:
            raise ModelError(f"{file}: tensor {tensor.name} starts at byte {tensor.offset}, expected {position}")
        position += tensor.num_bytes
    if position != size:
        raise ModelError(f"{file} has {size} bytes, its header describes {position}: download it again")
