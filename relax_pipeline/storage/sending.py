"""Sending files to an object store: every one is there, proved by reading it back, or sending has failed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from relax_pipeline.errors import PublishError
from relax_pipeline.storage.base import ObjectStore

Progress = Callable[[int, int], None]
"""Told bytes at the destination so far, and bytes in all."""

_FILES_AT_ONCE = 2
"""One is read back while the next is sent."""
_SENDS_PER_FILE = 2


@dataclass(frozen=True, slots=True)
class PayloadFile:
    """One file to send and where its content is."""

    name: str
    """Relative to where it is sent, '/' between parts."""
    size: int
    """Bytes."""
    sha256: str
    content: Path | bytes


def send_payload(store: ObjectStore, prefix: str, payload: Sequence[PayloadFile], progress: Progress | None) -> int:
    """Bring every file to the store and read it back; return the bytes sent.

    Files that are there, whole, from an earlier attempt are read back only.

    Raises:
        PublishError: The store failed, or a file reads back as something else however often it is sent.
    """
    meter = _Meter(sum(file.size for file in payload), progress)
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        futures = [pool.submit(_ensure, store, f"{prefix}/{file.name}", file, meter) for file in payload]
        try:
            return sum(future.result() for future in as_completed(futures))
        except BaseException:
            meter.stopped = True
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _ensure(store: ObjectStore, key: str, file: PayloadFile, arrived: Callable[[int], None]) -> int:
    """Send one file unless the store has it, and prove by reading it back that it has; return the bytes sent."""
    size, sha256 = file.size, file.sha256
    there = store.head(key)
    if there and there.size == size and there.sha256 in (None, sha256) and store.sha256(key) == sha256:
        arrived(size)
        return 0
    for sends in range(1, _SENDS_PER_FILE + 1):
        if isinstance(file.content, bytes):
            store.put_bytes(key, file.content)
            arrived(size)
        else:
            store.put_file(key, file.content, sha256=sha256, sent=arrived)
        found = store.sha256(key)
        if found == sha256:
            return sends * size
    raise PublishError(
        f"{store.uri}/{key} reads back as sha256 {found} where {sha256} was sent, {_SENDS_PER_FILE} times: "
        "the file changes while it is sent, or the store or the way to it corrupts data"
    )


class _Meter:
    """Counts the bytes that arrive, in whichever thread; once stopped, it fails the thread that reports more."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.stopped = False
        self._done, self._total, self._progress = 0, total, progress
        self._lock = threading.Lock()

    def __call__(self, num_bytes: int) -> None:
        with self._lock:
            if self.stopped:
                raise PublishError("stopped, because another file failed")
            # What is sent twice counts once.
            self._done = min(self._done + num_bytes, self._total)
            if self._progress:
                self._progress(self._done, self._total)
