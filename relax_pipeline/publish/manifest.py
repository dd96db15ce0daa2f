"""What a published model is: where it lies, its manifest, and the pointer to a run's latest one.

    <destination>/<run_name>/step-0000120-<digest12>/   payload files, then manifest.json
    <destination>/<run_name>/latest.json                optional

The folder's name holds the digest of what is in it, so it is never overwritten with something else. A folder without
manifest.json is not published: readers must not look into it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from relax_pipeline.errors import PublishError
from relax_pipeline.storage.base import ObjectStore

MANIFEST = "manifest.json"
LATEST = "latest.json"
MANIFEST_KEY = re.compile(rf"[^/]+/step-\d{{7,}}-[0-9a-f]{{12}}/{re.escape(MANIFEST)}")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileEntry(_Record):
    """One payload file."""

    name: str
    """Relative to the model's folder, '/' between parts."""
    size: int
    """Bytes."""
    sha256: str


class Manifest(_Record):
    """Everything a reader needs to fetch and check a published model."""

    format: Literal[1] = 1
    run_name: str
    step: int
    digest: str
    """sha256 over the names, sizes and digests of the files."""
    created: str
    """UTC, ISO 8601, to the microsecond: sorts as text."""
    attempt: str
    """Differs between any two publishers, so that each can tell its own manifest."""
    files: tuple[FileEntry, ...]
    """Sorted by name."""

    @property
    def prefix(self) -> str:
        """The model's folder below the destination."""
        return f"{self.run_name}/step-{self.step:07d}-{self.digest[:12]}"

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(file.size for file in self.files)


class LatestPointer(_Record):
    """Names a run's latest model; ordered by step, then by when it was published."""

    step: int
    created: str
    prefix: str

    @property
    def order(self) -> tuple[int, str]:
        """Later models compare greater."""
        return self.step, self.created


_R = TypeVar("_R", bound=_Record)


def files_digest(files: Iterable[FileEntry]) -> str:
    """Return the sha256 that stands for a set of files, whatever their order."""
    lines = sorted(f"{file.name}|{file.size}|{file.sha256}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def read_record(store: ObjectStore, key: str, kind: type[_R]) -> _R | None:
    """Read one JSON record; None: there is none.

    Raises:
        PublishError: It cannot be read as such a record.
    """
    data = store.get_bytes(key)
    if data is None:
        return None
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise PublishError(
            f"{store.uri}/{key} is no {kind.__name__} that this version reads; "
            f"another program wrote it, or a newer version of this one: {error}"
        ) from error


def write_record(store: ObjectStore, key: str, record: _Record, *, if_match: str | None = None) -> bool:
    """Write one JSON record where there is none, or over the version given; return whether it was written."""
    data = record.model_dump_json(indent=2).encode()
    return store.put_bytes(key, data, if_none_match=if_match is None, if_match=if_match)
