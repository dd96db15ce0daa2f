"""The checkpoints of one run: begun out of sight, committed whole, pruned unless somebody reads them."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from relax_pipeline.checkpoint.manifest import COMMITTED_FILE, Manifest
from relax_pipeline.checkpoint.seal import seal, verify
from relax_pipeline.errors import CheckpointError, RelaxError, TrainerError
from relax_pipeline.storage.files import fsync_path

_STEP_FOLDER = re.compile(r"step-(\d{7,})")


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """A committed checkpoint."""

    step: int
    path: Path

    @property
    def num_bytes(self) -> int:
        """Size of all its files."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())


class CheckpointStore:
    """A folder of checkpoints. One process writes at a time (`RunLock`); any number may read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, manifest: Manifest, write: Callable[[Path], None]) -> CheckpointRef:
        """Write a checkpoint; the same step again replaces what is there.

        Args:
            manifest: All but the files.
            write: Fills the folder it is given.

        Raises:
            CheckpointError: Nothing was written, e.g. because the disk is full; earlier checkpoints are as they were.
            TrainerError: The trainer was lost meanwhile; likewise.
        """
        self.begin(manifest.step, write)
        return self.commit(manifest, lambda: None)

    def begin(self, step: int, write: Callable[[Path], None]) -> None:
        """Begin a checkpoint: no one sees it before `commit`, and the next `begin` removes what was not committed.

        Args:
            step: Of the checkpoint.
            write: Fills the folder it is given, or begins to.

        Raises:
            CheckpointError: As `save`.
        """
        temporary, final = self._folders(step)
        with self._undone_unless_whole(temporary, final):
            self._remove_leftovers()
            temporary.mkdir(parents=True)
            write(temporary)

    def commit(self, manifest: Manifest, finish: Callable[[], None]) -> CheckpointRef:
        """Make the checkpoint that was begun one that counts; the same step again replaces what is there.

        Args:
            manifest: All but the files.
            finish: Waits until the folder is filled.

        Raises:
            CheckpointError: As `save`.
        """
        temporary, final = self._folders(manifest.step)
        with self._undone_unless_whole(temporary, final):
            finish()
            seal(temporary, manifest)
            if final.exists() and self._hide(final) is None:
                raise CheckpointError("another process is reading it")
            temporary.rename(final)
            fsync_path(self.folder)
            self._remove_leftovers()
        return CheckpointRef(manifest.step, final)

    def committed(self) -> list[CheckpointRef]:
        """Return the committed checkpoints, oldest first; unfinished ones are not listed."""
        refs = []
        for path in self.folder.glob("step-*"):
            match = _STEP_FOLDER.fullmatch(path.name)
            if match and (path / COMMITTED_FILE).is_file():
                refs.append(CheckpointRef(int(match.group(1)), path))
        return sorted(refs, key=lambda ref: ref.step)

    def newest_intact(self, on_damaged: Callable[[CheckpointError], None]) -> CheckpointRef | None:
        """Return the newest checkpoint whose files are as they were written, or None where there is none at all.

        Args:
            on_damaged: Told of each newer checkpoint that was passed over.

        Raises:
            CheckpointError: There are checkpoints, and every one is damaged.
        """
        refs = self.committed()
        for ref in reversed(refs):
            try:
                verify(ref.path)
            except CheckpointError as error:
                on_damaged(error)
                continue
            return ref
        if refs:
            raise CheckpointError(f"all {len(refs)} checkpoints in {self.folder} are damaged; see the messages above")
        return None

    def prune(self, *, keep_last: int, keep_every: int | None) -> list[CheckpointRef]:
        """Delete old checkpoints, never one that is in use, and return those deleted."""
        deleted = []
        for ref in self.committed()[:-keep_last]:
            if keep_every and ref.step % keep_every == 0:
                continue
            if trash := self._hide(ref.path):
                shutil.rmtree(trash)
                deleted.append(ref)
        return deleted

    def _folders(self, step: int) -> tuple[Path, Path]:
        """Return where a checkpoint is written, and where it lies once it counts."""
        final = self.folder / f"step-{step:07d}"
        return self.folder / f".tmp-{final.name}", final

    @contextmanager
    def _undone_unless_whole(self, temporary: Path, final: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError, RelaxError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, TrainerError):
                raise  # a rank is lost: no fault of the checkpoints, and another attempt may save
            raise CheckpointError(_explain_failure(error, final, self.folder)) from error

    def _hide(self, path: Path) -> Path | None:
        """Take a checkpoint out of sight at once and return where it is now; None if a reader holds it."""
        trash, committed = path.with_name(f".trash-{path.name}"), path / COMMITTED_FILE
        if not committed.is_file():  # someone has deleted parts of it; no reader can hold it
            return path.rename(trash)
        with committed.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            return path.rename(trash)

    def _remove_leftovers(self) -> None:
        """Delete what was replaced, and what an attempt that was killed has left."""
        for pattern in (".tmp-*", ".trash-*"):
            for path in self.folder.glob(pattern):
                shutil.rmtree(path)


@contextmanager
def in_use(ref: CheckpointRef) -> Iterator[None]:
    """Keep a checkpoint from being pruned while this process reads it; a crash lets go of it.

    Raises:
        CheckpointError: It was pruned before.
    """
    committed = ref.path / COMMITTED_FILE
    with ExitStack() as stack:
        try:
            file = stack.enter_context(committed.open("rb"))
            fcntl.flock(file, fcntl.LOCK_SH)
            if not os.path.samestat(os.fstat(file.fileno()), committed.stat()):
                raise FileNotFoundError
        except FileNotFoundError:
            raise CheckpointError(f"{ref.path} is gone: it was pruned, or saved again; look for a newer one") from None
        yield


def _explain_failure(error: Exception, final: Path, folder: Path) -> str:
    message = f"{final.name} was not saved: {error}"
    if isinstance(error, PermissionError):
        return f"{message}; make {folder} writable, or set output_dir to a folder that is"
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
        return f"{message}; free space on the disk of {folder}, or lower checkpoint.keep_last, and run again"
    return f"{message}; earlier checkpoints are as they were"
