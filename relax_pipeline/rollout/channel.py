"""A block of bytes from one process to another over NCCL, or gloo where there are no GPUs, through a bounded buffer."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

Backend = Literal["nccl", "gloo"]
SENDER, RECEIVER = 0, 1


class Channel:
    """One end of a group of two that is apart from every other group of the process."""

    def __init__(self, store: PrefixStore, *, rank: int, backend: Backend, buffer_bytes: int, timeout: float) -> None:
        """Meet the other end.

        Args:
            store: Both ends' own.
            rank: SENDER or RECEIVER.
            backend: The same at both ends.
            buffer_bytes: Most that is on the way at once, and on a GPU for it.
            timeout: Seconds for each part.
        """
        self._group: Any
        self._buffer_bytes = buffer_bytes
        self._device = torch.device("cuda" if backend == "nccl" else "cpu")
        wait = timedelta(seconds=timeout)
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = wait
            self._group = dist.ProcessGroupNCCL(store, rank, 2, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, 2, wait)

    def send(self, block: torch.Tensor) -> None:
        """Send bytes; those in the host's memory go to the GPU part by part, while the part before is on its way."""
        for part in self._parts(block):
            self._group.send([part.to(self._device)], RECEIVER, 0).wait()
        self._finish()

    def receive(self, block: torch.Tensor) -> None:
        """Fill a block of the same size; with NCCL one in the host's memory is filled part by part through the GPU."""
        for part in self._parts(block):
            arrived = part if part.device.type == self._device.type else torch.empty_like(part, device=self._device)
            self._group.recv([arrived], SENDER, 0).wait()
            if arrived is not part:
                part.copy_(arrived)
        self._finish()

    def _parts(self, block: torch.Tensor) -> Iterator[torch.Tensor]:
        for start in range(0, len(block), self._buffer_bytes):
            yield block[start : start + self._buffer_bytes]

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
