"""Tensors in one block of memory that other processes of this host can map: only a name passes between them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from relax_pipeline.errors import EngineError

MEMORY_FOLDER = Path("/dev/shm")
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor lies in a block."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Byte."""
    stop: int


class SharedTensors(Mapping[str, torch.Tensor]):
    """A mapping from name to tensor that is passed by name and opened where it is read.

    The block is written once and never again, and each reader maps it privately, so nobody can change what another
    one reads. It lives until the maker has called `unlink` and the last reader has let go of its tensors.

    Attributes:
        path: File in memory.
        num_bytes: Of the block, gaps included.
        places: By tensor name.
    """

    def __init__(self, path: Path, places: Mapping[str, Place]) -> None:
        self.path, self.places = path, dict(places)
        self.num_bytes = max((place.stop for place in self.places.values()), default=0)
        self._block: torch.Tensor | None = None

    @classmethod
    def write(cls, tensors: Mapping[str, torch.Tensor]) -> SharedTensors:
        """Copy tensors into a new block.

        Raises:
            EngineError: There is not enough shared memory.
        """
        places, end = {}, 0
        for name, tensor in tensors.items():
            places[name] = Place(tensor.dtype, tuple(tensor.shape), end, end + tensor.nbytes)
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        handle, path = tempfile.mkstemp(prefix="relax-", dir=MEMORY_FOLDER)
        made = cls(Path(path), places)
        try:
            os.posix_fallocate(handle, 0, max(made.num_bytes, 1))  # or a full memory shows as a bus error later
        except OSError as error:
            made.unlink()
            raise EngineError(f"{MEMORY_FOLDER} has no {end} bytes free for weights on their way: {error}") from error
        finally:
            os.close(handle)
        if made.num_bytes:
            block = torch.from_file(path, shared=True, size=made.num_bytes, dtype=torch.uint8)
            for name, place in places.items():
                block[place.start : place.stop].copy_(tensors[name].detach().contiguous().reshape(-1).view(torch.uint8))
        return made

    def unlink(self) -> None:
        """Let the block go with its last reader."""
        self.path.unlink(missing_ok=True)

    def __getitem__(self, name: str) -> torch.Tensor:
        place = self.places[name]
        if self._block is None:
            self._block = torch.from_file(str(self.path), shared=False, size=self.num_bytes, dtype=torch.uint8)
        return self._block[place.start : place.stop].view(place.dtype).reshape(place.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __reduce__(self) -> tuple[type[SharedTensors], tuple[Path, dict[str, Place]]]:
        return SharedTensors, (self.path, self.places)
