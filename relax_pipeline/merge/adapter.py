"""An adapter folder, or the adapter inside a checkpoint, opened for merging."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from relax_pipeline.errors import AdapterError
from relax_pipeline.lora.adapter import CONFIG_FILE, WEIGHTS_FILE
from relax_pipeline.merge.adapter_config import AdapterConfig, read_adapter_config
from relax_pipeline.merge.base import read_json
from relax_pipeline.safetensors_io.header import TensorInfo, read_header
from relax_pipeline.safetensors_io.read import read_tensor

CHECKPOINT_MANIFEST = "manifest.json"
META_FILE = "relax_lora_meta.json"


class LazyTensors(Mapping[str, torch.Tensor]):
    """Names to tensors, each read from its file when asked for; the last few are kept."""

    def __init__(self, infos: Mapping[str, TensorInfo]) -> None:
        self.infos = infos
        self._read = lru_cache(maxsize=8)(lambda name: read_tensor(infos[name]))

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)


@dataclass(frozen=True)
class AdapterFiles:
    """A LoRA adapter on disk."""

    folder: Path
    config: AdapterConfig
    tensors: LazyTensors
    base_digest: str | None
    """Digest of the base it was trained on, where it was recorded."""


def open_adapter(path: Path) -> AdapterFiles:
    """Open a PEFT LoRA folder, or a checkpoint folder that has one in `adapter/`.

    Raises:
        AdapterError: Files are missing, or the adapter is of a kind that cannot be merged.
    """
    inner = path / "adapter"
    folder = inner if (inner / CONFIG_FILE).is_file() else path
    if not (folder / CONFIG_FILE).is_file():
        raise AdapterError(f"{path} is neither an adapter nor a checkpoint: it has no {CONFIG_FILE}; check --adapter")
    if not (folder / WEIGHTS_FILE).is_file():
        pickled = " (adapter_model.bin is a pickle: load it with peft and save_pretrained it again)"
        raise AdapterError(
            f"{folder} has no {WEIGHTS_FILE}{pickled if (folder / 'adapter_model.bin').is_file() else ''}"
        )
    infos = {tensor.name: tensor for tensor in read_header(folder / WEIGHTS_FILE).tensors}
    if not infos:
        raise AdapterError(f"{folder / WEIGHTS_FILE} holds no tensors: nothing was trained, or export lost it")
    recorded = {_recorded_digest(file) for file in (folder / META_FILE, path / CHECKPOINT_MANIFEST)} - {None}
    if len(recorded) > 1:
        raise AdapterError(
            f"{path}: {META_FILE} and {CHECKPOINT_MANIFEST} name different bases: {sorted(map(str, recorded))}"
        )
    return AdapterFiles(folder, read_adapter_config(folder / CONFIG_FILE), LazyTensors(infos), *(recorded or {None}))


def _recorded_digest(file: Path) -> str | None:
    if not file.is_file():
        return None
    digest: str | None = read_json(file, AdapterError).get("base_digest")
    return digest
