"""Headers of safetensors files, reads of parts of them, and the identity of a model folder."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from relax_pipeline.errors import ModelError
from relax_pipeline.safetensors_io.header import TensorInfo, build_header, read_header
from relax_pipeline.safetensors_io.identity import model_digest
from relax_pipeline.safetensors_io.read import TORCH_DTYPES, FileReader, read_bytes, read_rows, read_tensor

TENSORS = {
    "a": torch.arange(15, dtype=torch.bfloat16).view(5, 3),
    "b": torch.tensor(2.5, dtype=torch.float64),
    "c": torch.arange(7, dtype=torch.uint8),
    "d": torch.empty(0, 4),
    "e": torch.arange(24, dtype=torch.int32).view(2, 3, 4),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "x.safetensors", metadata={"format": "pt"})
    return tmp_path / "x.safetensors"


def raw_file(path: Path, entries: dict[str, object], data: bytes) -> Path:
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_a_header_describes_every_tensor(file: Path) -> None:
    header = read_header(file)
    assert header.metadata == {"format": "pt"}
    assert {info.name: (TORCH_DTYPES[info.dtype], info.shape) for info in header.tensors} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()
    }
    assert file.read_bytes().startswith(header.raw)


def test_tensors_are_read_as_the_library_reads_them(file: Path) -> None:
    for info in read_header(file).tensors:
        assert torch.equal(read_tensor(info), TENSORS[info.name])


def test_rows_are_read_without_the_rest(file: Path) -> None:
    infos = {info.name: info for info in read_header(file).tensors}
    with FileReader(file) as reader:
        assert torch.equal(read_rows(reader, infos["a"], 2, 4), TENSORS["a"][2:4])
        assert torch.equal(read_rows(reader, infos["e"], 1, 2), TENSORS["e"][1:2])


def test_a_built_header_is_read_by_the_library(tmp_path: Path) -> None:
    infos = [
        TensorInfo("odd", "U8", (3,), 0),
        TensorInfo("wide", "F32", (2, 2), 0),
        TensorInfo("half", "BF16", (5,), 0),
    ]
    header = build_header(infos, {"format": "pt"})
    assert [info.name for info in header.tensors] == ["wide", "half", "odd"]
    assert all(info.offset % 8 == 0 for info in header.tensors[:1])
    (tmp_path / "new.safetensors").write_bytes(header.raw + bytes(16 + 10 + 3))
    loaded = load_file(tmp_path / "new.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in loaded.items()} == {"wide": (2, 2), "half": (5,), "odd": (3,)}


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("entries", "size", "message"),
    [
        ({"x": ENTRY}, 7, "download it again"),
        ({"x": ENTRY}, 9, "download it again"),
        ({"x": {**ENTRY, "shape": [3]}}, 8, "lies in 8 bytes"),
        ({"x": {**ENTRY, "dtype": "F4"}}, 8, "dtype F4"),
        ({"x": ENTRY, "y": {**ENTRY, "data_offsets": [12, 20]}}, 20, "starts at byte"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, entries: dict[str, object], size: int, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_header(raw_file(tmp_path / "x.safetensors", entries, bytes(size)))


@pytest.mark.parametrize("content", [b"", b"\x01", struct.pack("<Q", 5) + b"{bad}", struct.pack("<Q", 1 << 40) + b"{}"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="safetensors file"):
        read_header(tmp_path / "x.safetensors")


def test_reading_past_the_end_is_an_error(file: Path) -> None:
    with pytest.raises(ModelError, match="it was changed"):
        read_bytes(file, 8, file.stat().st_size)


# --- identity ---


def model(folder: Path, value: float = 1.0) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"x": torch.full((3,), value)}, folder / "model.safetensors")
    return folder


def test_identity_is_content_and_neither_place_nor_time(tmp_path: Path) -> None:
    first, copy = model(tmp_path / "a"), model(tmp_path / "b")
    os.utime(copy / "model.safetensors", ns=(1, 1))
    assert model_digest(first) == model_digest(copy)


def test_identity_notices_a_change_of_equal_size_and_time(tmp_path: Path) -> None:
    first, other = model(tmp_path / "a"), model(tmp_path / "b", 2.0)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    os.utime(other / "model.safetensors", ns=(stamp, stamp))
    assert model_digest(first) != model_digest(other)


@pytest.mark.parametrize(
    ("remove", "message"), [("config.json", "no config.json"), ("model.safetensors", "no \\*.safetensors")]
)
def test_identity_needs_config_and_weights(tmp_path: Path, remove: str, message: str) -> None:
    (model(tmp_path / "a") / remove).unlink()
    with pytest.raises(ModelError, match=message):
        model_digest(tmp_path / "a")


def test_identity_of_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model folder"):
        model_digest(tmp_path / "nowhere")
