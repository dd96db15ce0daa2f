"""Each committed checkpoint of a run goes to the store in the background; the run stays this attempt's meanwhile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from pathlib import Path
from queue import Queue

from relax_pipeline.checkpoint.owner import RENEW_SECONDS, Ownership
from relax_pipeline.checkpoint.remote import RemoteCheckpoints
from relax_pipeline.checkpoint.store import CheckpointRef, CheckpointStore
from relax_pipeline.config import CheckpointConfig
from relax_pipeline.errors import CheckpointError, PublishError, RunLockedError
from relax_pipeline.storage.stores import open_store

CHANGES_FILE = "changes.json"
"""What was changed at pauses of a run: `session.pause` reads and writes it."""
_CLOSE_SECONDS = 5.0

logger = logging.getLogger(__name__)


@contextmanager
def open_mirror(config: CheckpointConfig, run_name: str, run_folder: Path) -> Iterator[Mirror | None]:
    """Own the run in its store, bring a newer checkpoint from there, and send new ones; None without a store.

    Raises:
        RunLockedError: Another attempt trains this run, on this host or another.
        CheckpointError: The newest checkpoint cannot be fetched.
        PublishError: The store failed.
    """
    if config.store is None:
        yield None
        return
    store = open_store(config.store, endpoint_url=config.endpoint_url)
    ownership = Ownership(store, run_name, run_folder)
    ownership.acquire()
    metrics, changes = run_folder / "metrics.jsonl", run_folder / CHANGES_FILE
    mirror = Mirror(RemoteCheckpoints(store, run_name), ownership, config, beside=(metrics, changes))
    try:
        if fetch_newest(mirror.remote, CheckpointStore(run_folder / "checkpoints")):
            mirror.remote.fetch_beside(metrics)
        yield mirror
    finally:
        mirror.close()


def fetch_changes(config: CheckpointConfig, run_name: str, run_folder: Path) -> None:
    """Bring what was changed at pauses to a machine that is behind the store. Needs no ownership: nothing is decided.

    Raises:
        PublishError: The store failed.
    """
    if config.store is None:
        return
    remote = RemoteCheckpoints(open_store(config.store, endpoint_url=config.endpoint_url), run_name)
    here, there = CheckpointStore(run_folder / "checkpoints").committed(), remote.committed()
    if there and (not here or here[-1].step < there[-1].step):
        remote.fetch_beside(run_folder / CHANGES_FILE)


def fetch_newest(remote: RemoteCheckpoints, local: CheckpointStore) -> CheckpointRef | None:
    """Bring the store's newest checkpoint to this machine unless one as new is there intact; return what came."""
    there = remote.committed()
    if not there or _newest_intact_step(local) >= there[-1].step:
        return None
    logger.info("fetching the checkpoint of step %d from %s", there[-1].step, remote.store.uri)
    return remote.download(there[-1], local)


class Mirror:
    """Sends checkpoints from one thread and renews the ownership from another. A store that fails costs no training."""

    def __init__(
        self, remote: RemoteCheckpoints, ownership: Ownership, config: CheckpointConfig, *, beside: Sequence[Path]
    ) -> None:
        self.remote = remote
        self._ownership, self._config, self._beside = ownership, config, beside
        self._queue: Queue[CheckpointRef | None] = Queue()
        self._failure: str | None = None
        self._stopping = threading.Event()
        self._sender = _thread(self._send_all, "checkpoint-sender")
        self._renewer = _thread(self._renew, "checkpoint-owner")
        self._sender.start()
        self._renewer.start()

    def send(self, ref: CheckpointRef) -> None:
        """Have a checkpoint sent, after those before it."""
        self._queue.put(ref)

    def check(self) -> None:
        """Ask whether the run is still this attempt's; costs nothing.

        Raises:
            RunLockedError: It is not: stop.
        """
        self._ownership.check()

    def finish(self) -> None:
        """Wait until everything is sent.

        Raises:
            RunLockedError: Another attempt has taken the run.
            PublishError: The newest checkpoint is on this machine only.
        """
        self._queue.join()
        self.check()
        if self._failure:
            raise PublishError(f"{self._failure}; it is safe on this machine: start the run again to send it")

    def close(self) -> None:
        """Stop, in the middle of a file if need be, and let go of the run."""
        self._stopping.set()
        self._queue.put(None)
        self._sender.join(_CLOSE_SECONDS)

    def _send_all(self) -> None:
        while ref := self._queue.get():
            if not self._stopping.is_set():
                self._send(ref)
            self._queue.task_done()
        try:
            self._ownership.release()
        except PublishError as error:
            logger.warning("the run is still marked as owned, which delays its next start elsewhere: %s", error)

    def _send(self, ref: CheckpointRef) -> None:
        try:
            self.remote.upload(ref, may_commit=self._ownership.renew, progress=self._stop_if_asked)
            for file in self._beside:
                self.remote.send_beside(file)
            self.remote.prune(keep_last=self._config.remote_keep_last, keep_every=self._config.remote_keep_every)
            self._failure = None
        except (PublishError, CheckpointError, RunLockedError) as error:
            self._failure = f"step {ref.step} was not sent to {self.remote.store.uri}: {error}"
            logger.warning("%s", self._failure)

    def _stop_if_asked(self, done: int, total: int) -> None:
        if self._stopping.is_set():
            raise PublishError(f"stopped after {done:,} of {total:,} bytes")

    def _renew(self) -> None:
        while not self._stopping.wait(RENEW_SECONDS):
            try:
                self._ownership.renew()
            except PublishError as error:
                logger.warning("the ownership of the run could not be renewed: %s", error)
            except RunLockedError as error:
                logger.error("%s", error)
                return


def _thread(run: Callable[[], None], name: str) -> threading.Thread:
    """A thread in the context of its maker, by which Prefect knows whose log its messages belong to."""
    return threading.Thread(target=copy_context().run, args=(run,), daemon=True, name=name)


def _newest_intact_step(local: CheckpointStore) -> int:
    """Return the step of the newest intact checkpoint; -1 where there is none."""
    try:
        ref = local.newest_intact(lambda error: logger.warning("a damaged checkpoint was passed over: %s", error))
    except CheckpointError:
        return -1
    return ref.step if ref else -1
