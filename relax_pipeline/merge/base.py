"""The base checkpoint as its headers describe it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_pipeline.errors import ModelError, RelaxError
from relax_pipeline.safetensors_io.header import Header, TensorInfo, read_header

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


@dataclass(frozen=True)
class Base:
    """A Hugging Face checkpoint folder, read as far as its headers."""

    folder: Path
    config: Mapping[str, Any]
    headers: Mapping[str, Header]
    """File name to header, for each shard that the index names."""
    index: Mapping[str, Any] | None
    """model.safetensors.index.json; None for a single file."""
    tensors: Mapping[str, TensorInfo]

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The language model's part of the config: the config itself for a text-only model."""
        text: Mapping[str, Any] = self.config.get("text_config") or self.config
        return text


def read_base(folder: Path) -> Base:
    """Read config, index and headers of a checkpoint folder.

    Raises:
        ModelError: Something is missing, damaged or contradicts the index.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise ModelError(f"{folder} has no {CONFIG_FILE}, so it is no Hugging Face checkpoint; check --base")
    config = read_json(folder / CONFIG_FILE, ModelError)
    index = read_json(folder / INDEX_FILE, ModelError) if (folder / INDEX_FILE).is_file() else None
    files = sorted(set(index["weight_map"].values())) if index else [_single_file(folder)]
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise ModelError(f"{folder} lacks {missing[:5]} ({len(missing)} files) that {INDEX_FILE} names: download again")
    headers = {name: read_header(folder / name) for name in files}
    tensors: dict[str, TensorInfo] = {}
    for name, header in headers.items():
        for tensor in header.tensors:
            if tensor.name in tensors:
                raise ModelError(f"{tensor.name} stands in {tensors[tensor.name].file.name} and in {name}; keep one")
            tensors[tensor.name] = tensor
    if index:
        _check_index(index["weight_map"], tensors)
    return Base(folder, config, headers, index, tensors)


def read_json(file: Path, kind: type[RelaxError]) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        kind: The file holds something else.
    """
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise kind(f"{file} is no JSON: {error}; copy it again") from error
    if not isinstance(content, dict):
        raise kind(f"{file} holds a JSON {type(content).__name__}, expected an object")
    return content


def _single_file(folder: Path) -> str:
    if (folder / SINGLE_FILE).is_file():
        return SINGLE_FILE
    found = sorted(file.name for file in folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    raise ModelError(
        f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE} ({len(found)} other *.safetensors files); "
        "convert the checkpoint to safetensors with an index first"
    )


def _check_index(weight_map: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> None:
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file.name != file:
            raise ModelError(f"{INDEX_FILE} says that {name} is in {file}, and it is not: download the base again")
    unlisted = sorted(set(tensors) - set(weight_map))
    if unlisted:
        raise ModelError(f"{INDEX_FILE} does not list {unlisted[:5]} ({len(unlisted)} tensors) that the shards hold")
