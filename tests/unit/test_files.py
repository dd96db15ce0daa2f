from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from relax_pipeline.storage.files import fsync_tree, sha256_file, write_atomic


def test_sha256_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    assert sha256_file(tmp_path / "f") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize("content", ["größer\n", "größer\n".encode()])
def test_text_and_bytes_are_written_alike(tmp_path: Path, content: str | bytes) -> None:
    write_atomic(tmp_path / "f", content)
    assert (tmp_path / "f").read_bytes() == b"gr\xc3\xb6\xc3\x9fer\n"


def test_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    write_atomic(tmp_path / "f", "old")
    write_atomic(tmp_path / "f", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("f", "new")]


def test_failed_write_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    write_atomic(tmp_path / "f", "old")
    program = f"""
import resource, signal
from pathlib import Path
from relax_pipeline.storage.files import write_atomic
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
try:
    write_atomic(Path({str(tmp_path / "f")!r}), "x" * 100)
except OSError as error:
    print(error.strerror)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "File too large\n"
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("f", "old")]


def test_tree_with_folders_and_empty_files_can_be_flushed(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "f").touch()
    fsync_tree(tmp_path)
