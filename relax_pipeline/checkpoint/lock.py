"""One trainer per run on a host: a file lock that the kernel frees when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from relax_pipeline.errors import ConfigError, RunLockedError


@contextmanager
def run_lock(run_folder: Path) -> Iterator[None]:
    """Hold a run's folder for this process.

    Raises:
        RunLockedError: Another process trains this run.
        ConfigError: The folder cannot be written.
    """
    try:
        run_folder.mkdir(parents=True, exist_ok=True)
        file = (run_folder / ".lock").open("a+")
    except OSError as error:
        raise ConfigError(
            f"output_dir: {run_folder} cannot be written: {error.strerror}; set a writable one"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise RunLockedError(
                f"{run_folder.name} is being trained by process {file.read().strip() or 'unknown'}; "
                "wait for it, stop it, or use another run_name"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
