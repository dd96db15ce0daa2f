"""A Megatron checkpoint in the making: copied to host memory at once, written by a thread of each rank."""

from __future__ import annotations

import queue
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from relax_pipeline.errors import CheckpointError
from relax_pipeline.trainer.megatron.compat import Patch, patched
from relax_pipeline.trainer.megatron.optimizer import MasterOptimizer
from relax_pipeline.trainer.megatron.parallel import Ranks
from relax_pipeline.trainer.megatron.state import UPDATES, placed, reason, state_values


class Save:
    """What was held when it was made, on its way to the disk."""

    def __init__(
        self,
        folder: Path,
        chunks: Sequence[nn.Module],
        optimizer: MasterOptimizer,
        ranks: Ranks,
        *,
        frozen: Mapping[str, nn.Parameter],
        updates: int,
        write_adapter: Callable[[], None],
    ) -> None:
        """Copy masters, Adam state and the frozen parameters given, agree on who writes what, and begin to.

        Raises:
            CheckpointError: The folder cannot be written, or a parameter has no place in a checkpoint.
        """
        self._folder, self._ranks = folder, ranks
        copies = {
            kind: {name: value.to("cpu", copy=True) for name, value in part.items()}
            for kind, part in state_values(optimizer, frozen).items()
        }
        state = placed(chunks, optimizer, ranks, frozen, values=copies)
        results = Patch(
            filesystem_async, "_results_queue", queue.Queue(), "the default is a process that imports __main__ again"
        )
        with self._reported(), patched([results]):
            folder.mkdir(parents=True, exist_ok=True)
            self._request: Any = dist_checkpointing.save(
                state | {UPDATES: updates}, str(folder), async_sharded_save=True, async_strategy="mcore"
            )
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="save")
        self._adapter = self._threads.submit(write_adapter) if ranks.rank == 0 else None
        self._part = self._threads.submit(self._write)

    def finish(self) -> None:
        """Wait for this rank, then complete the folder with the others.

        Raises:
            CheckpointError: On all ranks, when one of them could not write.
        """
        self._part.result()
        with self._reported():
            for step in self._request.finalize_fns:
                step()
        self._ranks.on_first(lambda: self._adapter.result() if self._adapter else None)
        self.wait()

    def wait(self) -> None:
        """Wait until this rank writes no more."""
        self._threads.shutdown()

    def _write(self) -> None:
        """Write this rank's part. It needs no other rank, and what goes wrong is told when the folder is completed."""
        if self._request.async_fn is not None:
            self._request.async_fn(*self._request.async_fn_args)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError, CheckpointingException, CheckpointException) as error:
            free = shutil.disk_usage(self._folder).free >> 20 if self._folder.is_dir() else 0
            raise CheckpointError(f"{self._folder} cannot be written ({free} MiB are free): {reason(error)}") from error
