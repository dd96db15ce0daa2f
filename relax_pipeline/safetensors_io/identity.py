"""Which base model this is, by content: never by path or time."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from relax_pipeline.errors import ModelError

MAX_WORKERS = 16


def model_digest(folder: Path) -> str:
    """Return the sha256 over config.json and every safetensors file of a model folder.

    Hashing reads all weights once a process; a file that has not changed since is not read again.

    Raises:
        ModelError: The folder is missing, or holds no config.json or no safetensors weights.
    """
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    if not folder.is_dir():
        raise ModelError(f"no model folder {folder}; set model.path to a folder with a Hugging Face checkpoint")
    if not files[0].is_file():
        raise ModelError(f"{folder} has no config.json, so it is no Hugging Face checkpoint; check model.path")
    if len(files) == 1:
        raise ModelError(f"{folder} has no *.safetensors weights; convert the checkpoint to safetensors first")
    with ThreadPoolExecutor(min(MAX_WORKERS, os.cpu_count() or 1)) as pool:  # hashlib lets other threads run
        digests = list(pool.map(_cached_digest, files))
    lines = (f"{file.name}|{digest}|" for file, digest in zip(files, digests, strict=True))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _cached_digest(file: Path) -> str:
    stat = file.stat()
    return _file_digest(str(file), stat.st_ino, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=4096)
def _file_digest(path: str, _inode: int, _size: int, _mtime_ns: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
