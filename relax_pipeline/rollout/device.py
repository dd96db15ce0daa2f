"""Tensors in one block of a GPU's memory that other processes can map: only a handle passes between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from relax_pipeline.errors import EngineError
from relax_pipeline.rollout.block import Block, Place, fill, lay_out

_DEVICE, _COUNTER = 6, slice(11, 13)
"""Places in what torch passes to `rebuild_cuda_tensor`."""


@dataclass(frozen=True, slots=True)
class Handle:
    """What another process needs to map a block."""

    gpu: str
    """UUID: processes number their GPUs as they like."""
    arguments: tuple[Any, ...]
    """Of torch's `rebuild_cuda_tensor`."""


class DeviceTensors(Block):
    """A block that is passed by CUDA's handle and opened where it is read.

    The memory is its maker's, and readers hold no claim on it: it must not be released while one of them reads.
    """

    def __init__(self, places: Mapping[str, Place], handle: Handle | None = None) -> None:
        """Of a block that lies in another process; see `allocate` for one's own."""
        super().__init__(places)
        self._handle = handle
        self._block: torch.Tensor | None = None

    @classmethod
    def allocate(cls, places: Mapping[str, Place], device: torch.device) -> DeviceTensors:
        """Make a block, which the maker fills before it passes it on."""
        made = cls(places)
        made._block = torch.empty(made.num_bytes, dtype=torch.uint8, device=device)
        return made

    @classmethod
    def write(cls, tensors: Mapping[str, torch.Tensor]) -> DeviceTensors:
        """Copy tensors of one GPU into a new block there."""
        made = cls.allocate(lay_out(tensors), next(iter(tensors.values())).device)
        fill(made.whole(), made.places, tensors)
        return made

    def release(self) -> None:
        """See `Block.release`."""
        self._block = None

    def whole(self) -> torch.Tensor:
        """See `Block.whole`.

        Raises:
            EngineError: This process does not see the GPU.
        """
        if self._block is None:
            rebuild, arguments = self.opening()
            self._block = rebuild(*arguments)
        return self._block

    def opening(self) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return the call that maps the block in another process that sees the same GPUs as this one; raises alike."""
        handle = self._shared()
        arguments = list(handle.arguments)
        arguments[_DEVICE] = _index(handle.gpu)
        return rebuild_cuda_tensor, tuple(arguments)

    def __reduce__(self) -> tuple[type[DeviceTensors], tuple[dict[str, Place], Handle]]:
        return DeviceTensors, (self.places, self._shared())

    def _shared(self) -> Handle:
        """Return the handle; the maker makes it when it is first asked for."""
        if self._handle is None:
            assert self._block is not None, "the block has been released"
            _, arguments = reduce_tensor(self._block)  # type: ignore[no-untyped-call]
            # torch now counts one reader, and would keep released memory until that one is done. We have any number of
            # readers, even none, and release a block only when none is left.
            torch.UntypedStorage._release_ipc_counter_cuda(*arguments[_COUNTER])
            self._handle = Handle(str(torch.cuda.get_device_properties(arguments[_DEVICE]).uuid), arguments)
        return self._handle


def _index(gpu: str) -> int:
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == gpu:
            return index
    raise EngineError(f"weights lie on GPU {gpu}, which this engine's process does not see: set sync.transport to auto")
