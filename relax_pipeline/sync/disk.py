"""Through a folder that trainer and engines share: a PEFT folder a version, or a safetensors file a bucket."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from relax_pipeline.lora.adapter import WEIGHTS_FILE, write_adapter
from relax_pipeline.rollout.filed import FiledTensors
from relax_pipeline.types import Adapter


class Disk:
    """Implements `Transport`. A folder is renamed to its name once it is whole, so a reader never finds half of one."""

    def __init__(self, folder: Path, *, base_model: str) -> None:
        """Start empty: what an earlier attempt left is removed.

        Args:
            folder: Holds one folder a version.
            base_model: For adapter_config.json.
        """
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._folder, self._base_model = folder, base_model

    def adapter(self, adapter: Adapter) -> Adapter:
        """See `Transport.adapter`."""
        final = self._of(adapter.info.version)
        partial = final.with_suffix(".partial")
        write_adapter(adapter, partial, base_model=self._base_model, metadata={})
        partial.rename(final)
        return replace(adapter, tensors=FiledTensors(final / WEIGHTS_FILE))

    def weights(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> Mapping[str, torch.Tensor]:
        """See `Transport.weights`."""
        folder = self._of(version)
        folder.mkdir(exist_ok=True)
        final = folder / f"{len(list(folder.iterdir()))}.safetensors"
        partial = final.with_suffix(".partial")
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, str(partial))
        partial.rename(final)
        return FiledTensors(final)

    def forget(self, version: int) -> None:
        """See `Transport.forget`."""
        shutil.rmtree(self._of(version), ignore_errors=True)

    def close(self) -> None:
        """See `Transport.close`."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _of(self, version: int) -> Path:
        return self._folder / f"v{version}"
