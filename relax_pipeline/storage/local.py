"""An object store in a local folder: each object is a file, renamed into place when whole."""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from relax_pipeline.errors import PublishError
from relax_pipeline.storage.base import ObjectInfo
from relax_pipeline.storage.files import fsync_path, sha256_file

_PARTIAL = ".partial"


class LocalStore:
    """Objects as files below a folder; see ObjectStore for the contract."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def uri(self) -> str:
        """The folder as file:// URI."""
        return self.root.as_uri()

    def put_file(self, key: str, path: Path, *, sha256: str, sent: Callable[[int], None]) -> None:
        """Copy a file under a temporary name, flush it to disk, and rename it into place."""
        del sha256  # files carry no notes
        with self._partial(key) as partial:
            shutil.copyfile(path, partial)
            fsync_path(partial)
            partial.replace(self._path(key))
        sent(path.stat().st_size)

    def put_bytes(self, key: str, data: bytes, *, if_none_match: bool = False, if_match: str | None = None) -> bool:
        """Write a small object; conditions hold against other processes on this file system."""
        path = self._path(key)
        with self._partial(key) as partial, _locked(path.parent):
            now = self.head(key)
            if (if_none_match and now) or (if_match is not None and (now is None or now.version != if_match)):
                return False
            partial.write_bytes(data)
            fsync_path(partial)
            partial.replace(path)
            fsync_path(path.parent)
        return True

    def get_bytes(self, key: str) -> bytes | None:
        """Read a file; None: there is none."""
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None

    def get_file(self, key: str, path: Path) -> None:
        """Copy a file."""
        try:
            shutil.copyfile(self._path(key), path)
        except FileNotFoundError as error:
            raise PublishError(f"{self.uri}/{key} is gone: another process deleted it") from error

    def head(self, key: str) -> ObjectInfo | None:
        """Describe a file by its size and inode; None: there is none."""
        try:
            stat = self._path(key).stat()
        except FileNotFoundError:
            return None
        return ObjectInfo(stat.st_size, None, f"{stat.st_ino}-{stat.st_mtime_ns}-{stat.st_size}")

    def sha256(self, key: str) -> str:
        """Read a file back and hash it."""
        try:
            return sha256_file(self._path(key))
        except FileNotFoundError as error:
            raise PublishError(f"{self.uri}/{key} is gone: another process deleted it") from error

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys of all whole files that start with a prefix, sorted."""
        files = (Path(folder, name) for folder, _, names in os.walk(self.root) for name in names)
        keys = (file.relative_to(self.root).as_posix() for file in files if file.suffix != _PARTIAL)
        return sorted(key for key in keys if key.startswith(prefix))

    def delete(self, key: str) -> None:
        """Remove a file, if it is there."""
        self._path(key).unlink(missing_ok=True)

    def discard_partial(self, prefix: str) -> None:
        """Remove temporary files below a prefix."""
        for partial in self._path(prefix).rglob(f".*{_PARTIAL}"):
            partial.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        path = self.root / key
        if not path.resolve().is_relative_to(self.root.resolve()):
            raise PublishError(f"key {key!r} leaves {self.uri}; use keys without '..'")
        return path

    @contextmanager
    def _partial(self, key: str) -> Iterator[Path]:
        """A temporary name beside the object's own."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}{_PARTIAL}")
        try:
            yield partial
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock: it ends with the process, so no stale lock can remain."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
