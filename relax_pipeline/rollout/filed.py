"""Tensors in a safetensors file that other processes can read: only its path passes between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from relax_pipeline.errors import EngineError


class FiledTensors(Mapping[str, torch.Tensor]):
    """A mapping from name to tensor that is passed by path and read where it is used.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors: dict[str, torch.Tensor] | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __reduce__(self) -> tuple[type[FiledTensors], tuple[Path]]:
        return FiledTensors, (self.path,)

    def _read(self) -> dict[str, torch.Tensor]:
        if self._tensors is None:
            if not self.path.is_file():
                raise EngineError(
                    f"{self.path} is not there: with sync.transport disk, output_dir must be a folder that the trainer "
                    "and all engines share"
                )
            with safe_open(self.path, "pt") as file:
                self._tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        return self._tensors
