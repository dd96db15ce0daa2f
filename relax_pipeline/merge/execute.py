"""Write the planned shards, tensor by tensor, and remember which are whole so that an interrupted merge resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock

import torch

from relax_pipeline.merge.outputs import Moved, Output, produce
from relax_pipeline.merge.plan import MergePlan
from relax_pipeline.merge.pool import worker_pool
from relax_pipeline.merge.shards import Shard
from relax_pipeline.storage.files import sha256_file, write_atomic

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), from any thread, one call at a time."""


@dataclass(frozen=True)
class ShardRecord:
    """One written shard."""

    file: str
    num_bytes: int
    sha256: str
    moved: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Changed tensor to (entries, entries that moved)."""


def write_shards(plan: MergePlan, folder: Path, records: Path, *, progress: Progress | None) -> list[ShardRecord]:
    """Write all shards of a plan into a folder, one after the other, on all processors; those already whole are kept.

    Args:
        plan: What to write.
        folder: Where the shards go.
        records: Where one small file for each finished shard goes.
        progress: Told of the bytes written.

    Raises:
        MergeError: A value is NaN or infinite.
        ModelError: A file changed while it was read.
    """
    count = _Counter(plan.num_bytes, progress)
    with worker_pool() as pool:
        try:
            kept = list(pool.map(lambda shard: _read_record(shard, folder, records), plan.shards))
            sealed: list[Future[ShardRecord]] = []
            for shard, record in zip(plan.shards, kept, strict=True):
                if record is not None:
                    count.add(record.num_bytes)
                    continue
                moved = _write(shard, plan.adapter.tensors, folder, pool, count.add)
                sealed.append(pool.submit(_seal, shard, folder, records, moved))  # while the next one is written
            new = iter(sealed)
            return [record or next(new).result() for record in kept]
        finally:
            count.stopped = True
            pool.shutdown(cancel_futures=True)


class _Counter:
    """Adds up the bytes of all workers; stops them once one has failed."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total, self.done, self.progress, self.lock, self.stopped = total, 0, progress, Lock(), False

    def add(self, num_bytes: int) -> None:
        with self.lock:
            if self.stopped:
                raise InterruptedError("another shard of this merge failed, or the merge was interrupted")
            self.done += num_bytes
            if self.progress:
                self.progress(self.done, self.total)


def _read_record(shard: Shard, folder: Path, records: Path) -> ShardRecord | None:
    """Return the record of a shard that an interrupted merge has left whole."""
    note, file = records / f"{shard.file}.json", folder / shard.file
    if not (note.is_file() and file.is_file()):
        return None
    record = ShardRecord(**json.loads(note.read_text()))
    whole = file.stat().st_size == record.num_bytes and sha256_file(file) == record.sha256
    return record if whole else None


def _write(
    shard: Shard, adapter: Mapping[str, torch.Tensor], folder: Path, pool: Executor, wrote: Callable[[int], None]
) -> dict[str, tuple[int, int]]:
    """Fill a preallocated file, several tensors at once; return targeted tensor to (entries, entries that moved)."""
    with (folder / shard.file).open("wb", buffering=0) as stream:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(stream.fileno(), 0, shard.num_bytes)
        stream.write(shard.header.raw)
        wrote(len(shard.header.raw))

        def write_tensor(output: Output, offset: int) -> Moved:
            moved = Moved()
            for chunk in produce(output, adapter, moved):
                data = chunk.numpy().data
                _write_at(stream.fileno(), data, offset)
                offset += len(data)
                wrote(len(data))
            return moved

        offsets = [tensor.offset for tensor in shard.header.tensors]
        futures = [pool.submit(write_tensor, *pair) for pair in zip(shard.outputs, offsets, strict=True)]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for failed in filter(Future.exception, done):
            failed.result()
    counts = zip(shard.outputs, futures, strict=True)
    return {o.info.name: (o.num_entries, future.result().count) for o, future in counts if o.is_targeted}


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _seal(shard: Shard, folder: Path, records: Path, moved: Mapping[str, tuple[int, int]]) -> ShardRecord:
    """Hash a written shard, flush it to disk, and only then note that it is whole."""
    file = folder / shard.file
    record = ShardRecord(shard.file, shard.num_bytes, sha256_file(file), moved)
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
    write_atomic(records / f"{shard.file}.json", json.dumps(asdict(record)))
    return record
