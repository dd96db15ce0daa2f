"""Write the planned shards, tensor by tensor, and remember which are whole so that an interrupted merge resumes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock

import torch

from relax_pipeline.merge.outputs import Moved, produce
from relax_pipeline.merge.plan import MergePlan
from relax_pipeline.merge.pool import shard_pool
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
    """Write all shards of a plan into a folder, several at once; those already whole are kept.

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
    with shard_pool(len(plan.shards)) as pool:
        futures = [pool.submit(_write_or_keep, shard, plan, folder, records, count) for shard in plan.shards]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for failed in filter(Future.exception, done):
                failed.result()
        finally:
            count.stopped = True
            pool.shutdown(cancel_futures=True)
        return [future.result() for future in futures]


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


def _write_or_keep(shard: Shard, plan: MergePlan, folder: Path, records: Path, count: _Counter) -> ShardRecord:
    note = records / f"{shard.file}.json"
    record = _read_record(note, folder / shard.file)
    if record is not None:
        count.add(record.num_bytes)
        return record
    record = write_shard(shard, plan.adapter.tensors, folder / shard.file, count.add)
    write_atomic(note, json.dumps(asdict(record)))
    return record


def _read_record(note: Path, file: Path) -> ShardRecord | None:
    if not (note.is_file() and file.is_file()):
        return None
    record = ShardRecord(**json.loads(note.read_text()))
    whole = file.stat().st_size == record.num_bytes and sha256_file(file) == record.sha256
    return record if whole else None


def write_shard(
    shard: Shard, adapter: Mapping[str, torch.Tensor], file: Path, wrote: Callable[[int], None]
) -> ShardRecord:
    """Write one shard from front to back into a preallocated file and flush it to disk."""
    moved: dict[str, tuple[int, int]] = {}
    digest = hashlib.sha256(shard.header.raw)
    with file.open("wb") as stream:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(stream.fileno(), 0, shard.num_bytes)
        stream.write(shard.header.raw)
        wrote(len(shard.header.raw))
        for output in shard.outputs:
            entries = Moved()
            for chunk in produce(output, adapter, entries):
                data = chunk.numpy().data
                stream.write(data)
                digest.update(data)
                wrote(len(data))
            if output.is_targeted:
                moved[output.info.name] = (output.num_entries, entries.count)
        stream.flush()
        os.fsync(stream.fileno())
    return ShardRecord(shard.file, shard.num_bytes, digest.hexdigest(), moved)
