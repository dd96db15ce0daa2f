"""Tensors in one block of memory that other processes of this host can map: only a name passes between them."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Mapping

import torch

from relax_pipeline.errors import EngineError
from relax_pipeline.rollout.block import Block, Place, fill, lay_out


class SharedTensors(Block):
    """A block that is passed by name and opened where it is read.

    Each reader maps it privately, so nobody can change what another one reads. It goes when its maker has released
    it, or died, and the last reader has let go of its tensors.

    Attributes:
        path: What other processes of this host open.
    """

    def __init__(self, path: str, places: Mapping[str, Place]) -> None:
        super().__init__(places)
        self.path = path
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
        made, content = cls.allocate(lay_out(tensors))
        fill(content, made.places, tensors)
        return made

    def release(self) -> None:
        """See `Block.release`; those who have it open keep it."""
        if self._close is not None:
            self._close()

    def whole(self) -> torch.Tensor:
        """See `Block.whole`."""
        if self._block is None:
            self._block = torch.from_file(self.path, shared=False, size=self.num_bytes, dtype=torch.uint8)
        return self._block

    def __reduce__(self) -> tuple[type[SharedTensors], tuple[str, dict[str, Place]]]:
        return SharedTensors, (self.path, self.places)
