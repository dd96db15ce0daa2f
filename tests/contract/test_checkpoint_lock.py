from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_pipeline.checkpoint.lock import run_lock
from relax_pipeline.errors import ConfigError, RunLockedError

HOLDER = """
import subprocess, sys, time
from pathlib import Path
from relax_pipeline.checkpoint.lock import run_lock
with run_lock(Path(sys.argv[1])):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print(child.pid, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of `tmp_path / "run"` and has a child, as a run has."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    yield process
    process.kill()
    process.wait()
    process.stdout.close()
    os.kill(child, signal.SIGKILL)


def test_second_process_is_refused_and_told_who_holds_it(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    message = rf"^run is being trained by process {holder.pid}; wait for it, stop it, or use another run_name$"
    with pytest.raises(RunLockedError, match=message), run_lock(tmp_path / "run"):
        pass


def test_killed_holder_frees_the_lock_though_its_child_lives(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with run_lock(tmp_path / "run"):
        assert (tmp_path / "run" / ".lock").read_text() == str(os.getpid())


def test_lock_is_free_after_the_block_and_after_an_error(tmp_path: Path) -> None:
    with run_lock(tmp_path / "run"):
        pass
    with pytest.raises(KeyError), run_lock(tmp_path / "run"):
        raise KeyError
    with run_lock(tmp_path / "run"):
        pass


def test_another_run_is_free(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    with run_lock(tmp_path / "other"):
        pass


def test_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(
            ConfigError, match=r"^output_dir: .*file/run cannot be written: Not a directory; set a writable one$"
        ),
        run_lock(tmp_path / "file" / "run"),
    ):
        pass
