"""The hidden folder that a merge works in: locked, resumable, and renamed to the final name at the end."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from relax_pipeline.errors import MergeError, RelaxError
from relax_pipeline.storage.files import fsync_path, fsync_tree, write_atomic

RECORDS = ".records"
SPARE_BYTES = 64 << 20


@dataclass(frozen=True)
class Workspace:
    """Where one merge writes."""

    folder: Path
    output: Path

    @property
    def records(self) -> Path:
        """Folder of notes on finished shards; no part of the result."""
        return self.folder / RECORDS

    def commit(self) -> None:
        """Flush everything and give the folder its final name.

        Raises:
            MergeError: Something else took that name in the meantime.
        """
        shutil.rmtree(self.records)
        fsync_tree(self.folder)
        try:
            self.folder.rename(self.output)
        except OSError as error:
            raise MergeError(f"{self.output} was filled while the merge ran; its result was dropped") from error
        fsync_path(self.output.parent)


@contextmanager
def open_workspace(output: Path, *, fingerprint: str) -> Iterator[Workspace]:
    """Create the working folder, or take up the one an interrupted merge of the same inputs left.

    The folder is removed when the merge fails for a reason that trying again would not change, and kept when it is
    interrupted.

    Args:
        output: Final name.
        fingerprint: What is merged; a folder left by anything else is emptied.

    Raises:
        MergeError: Another process merges into the same output.
    """
    workspace = Workspace(output.parent / f".{output.name}.merging", output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with _locked(output.parent / f".{output.name}.merging.lock", output):
        workspace.records.mkdir(parents=True, exist_ok=True)
        note = workspace.records / "fingerprint"
        if not note.is_file() or note.read_text() != fingerprint:
            shutil.rmtree(workspace.folder)
            workspace.records.mkdir(parents=True)
            write_atomic(note, fingerprint)
        try:
            yield workspace
        except RelaxError:
            shutil.rmtree(workspace.folder, ignore_errors=True)
            raise


def check_disk_space(workspace: Workspace, needed: int) -> None:
    """Fail before the first byte where the result would not fit.

    Raises:
        MergeError: With both numbers.
    """
    there = sum(file.stat().st_blocks * 512 for file in workspace.folder.glob("*") if file.is_file())
    free = shutil.disk_usage(workspace.folder).free + there
    if needed + SPARE_BYTES > free:
        raise MergeError(
            f"the merged model needs {needed / 1e9:.2f} GB in {workspace.output.parent}, {free / 1e9:.2f} GB are free; "
            "make room or choose another --output"
        )


@contextmanager
def _locked(file: Path, output: Path) -> Iterator[None]:
    """Hold a lock file, which is removed while it is still held: who gets hold of a removed one has come too late."""
    descriptor = os.open(file, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        if not _lock(descriptor, file):
            raise MergeError(f"another process is merging into {output}; wait for it or choose another --output")
        try:
            yield
        finally:
            file.unlink()
    finally:
        os.close(descriptor)


def _lock(descriptor: int, file: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file.stat().st_ino == os.fstat(descriptor).st_ino
    except (BlockingIOError, FileNotFoundError):
        return False
