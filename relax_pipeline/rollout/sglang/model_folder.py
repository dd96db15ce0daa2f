"""What a server will hold, read from the model folder: it answers no such question itself."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from relax_pipeline.errors import ModelError
from relax_pipeline.lora.fingerprint import combine_digests, fingerprints
from relax_pipeline.lora.names import transformers_name
from relax_pipeline.lora.packed import is_packed, packed_shapes
from relax_pipeline.safetensors_io.header import TensorInfo, folder_tensors
from relax_pipeline.safetensors_io.read import read_tensor

_HEAD = "lm_head.weight"
_DRAFTING = "mtp."
"""Layers that predict tokens further on, which neither the server loads nor a trainer has."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Names and shapes of a model's tensors; a tied head is the embedding, and has no name of its own."""

    tensors: dict[str, TensorInfo]
    """By the name in transformers."""

    @property
    def stored_names(self) -> dict[str, str]:
        """Names in the files, by which the server takes tensors, of those that have another in transformers."""
        return {name: info.name for name, info in self.tensors.items() if name != info.name}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """By tensor name."""
        return {name: tuple(info.shape) for name, info in self.tensors.items()}

    def linear_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return (out, in) of the linear modules inside decoder layers, (experts, out, in) of packed ones."""
        layers = {name: tuple(info.shape) for name, info in self.tensors.items() if ".layers." in name}
        matrices = {name for name, shape in layers.items() if name.endswith(".weight") and len(shape) == 2}
        return packed_shapes(
            {name.removesuffix(".weight"): s for name, s in layers.items() if name in matrices or is_packed(name)}
        )

    def digest(self, dtype: torch.dtype) -> str:
        """Return `EngineInfo.base_tensors_digest` of a server that loads this folder in a dtype."""

        def one(name: str) -> dict[str, str]:
            return fingerprints({name: read_tensor(self.tensors[name]).to(dtype)}).digests

        digests: dict[str, str] = {}
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
            for digest in threads.map(one, self.tensors):
                digests |= digest
        return combine_digests(digests)


def read_model_folder(folder: Path) -> ModelFolder:
    """Read the headers of a Hugging Face checkpoint.

    Raises:
        ModelError: The folder holds no config.json or no safetensors.
    """
    stored = [info for info in folder_tensors(folder) if not info.name.startswith(_DRAFTING)]
    if not (folder / "config.json").is_file() or not stored:
        raise ModelError(f"model.path {folder} is no Hugging Face checkpoint: it lacks config.json or *.safetensors")
    config = json.loads((folder / "config.json").read_text())
    tensors = {transformers_name(info.name) if "vision_config" in config else info.name: info for info in stored}
    if config.get("tie_word_embeddings"):
        tensors.pop(_HEAD, None)
    return ModelFolder(tensors)
