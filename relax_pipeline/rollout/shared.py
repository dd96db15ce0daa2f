"""Tensors in one block of memory that other processes of this host can map: only a name passes between them."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from relax_pipeline.errors import EngineError

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
    one reads. It goes when its maker has released it, or died, and the last reader has let go of its tensors.

    Attributes:
        path: What other processes of this host open.
        num_bytes: Of the block, gaps included.
        places: By tensor name.
    """

    def __init__(self, path: str, places: Mapping[str, Place]) -> None:
        self.path, self.places = path, dict(places)
        self.num_bytes = max((place.stop for place in self.places.values()), default=0)
        self._block: torch.Tensor | None = None
        self._close: weakref.finalize[..., SharedTensors] | None = None

    @classmethod
    def allocate(cls, places: Mapping[str, Place]) -> tuple[SharedTensors, torch.Tensor]:
        """Make a block for at least one byte; return it and its bytes, which the maker fills before it passes it on.

        Raises:
            EngineError: There is not enough memory.
        """
        # Memory without a file name: nothing is left behind, however this process ends.
        handle = os.memfd_create("relax-weights", os.MFD_CLOEXEC)
        made = cls(f"/proc/{os.getpid()}/fd/{handle}", places)
        made._close = weakref.finalize(made, os.close, handle)
        try:
            os.posix_fallocate(handle, 0, made.num_bytes)  # or a lack of memory shows later, as a bus error
        except OSError as error:
            made.release()
            raise EngineError(f"no {made.num_bytes} bytes of memory free for weights on their way: {error}") from error
        return made, torch.frombuffer(mmap.mmap(handle, made.num_bytes), dtype=torch.uint8)

    @classmethod
    def write(cls, tensors: Mapping[str, torch.Tensor]) -> SharedTensors:
        """Copy tensors, of which at least one has an entry, into a new block; raises as `allocate`."""
        places, end = {}, 0
        for name, tensor in tensors.items():
            places[name] = Place(tensor.dtype, tuple(tensor.shape), end, end + tensor.nbytes)
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        made, block = cls.allocate(places)
        for name, place in places.items():
            block[place.start : place.stop].copy_(tensors[name].detach().contiguous().reshape(-1).view(torch.uint8))
        return made

    def release(self) -> None:
        """Let the block go with its last reader; for its maker."""
        if self._close is not None:
            self._close()

    def whole(self) -> torch.Tensor:
        """Return the block's bytes, as a reader has them."""
        if self._block is None:
            self._block = torch.from_file(self.path, shared=False, size=self.num_bytes, dtype=torch.uint8)
        return self._block

    def __getitem__(self, name: str) -> torch.Tensor:
        place = self.places[name]
        return self.whole()[place.start : place.stop].view(place.dtype).reshape(place.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __reduce__(self) -> tuple[type[SharedTensors], tuple[str, dict[str, Place]]]:
        return SharedTensors, (self.path, self.places)
