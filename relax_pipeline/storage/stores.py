"""From a URI to the object store it names."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from relax_pipeline.errors import ConfigError
from relax_pipeline.storage.base import ObjectStore
from relax_pipeline.storage.local import LocalStore


def open_store(uri: str, *, endpoint_url: str | None = None) -> ObjectStore:
    """Return the store that file:///folder or s3://bucket/prefix names; nothing is contacted yet.

    Args:
        uri: Where the store's keys start.
        endpoint_url: Of an S3-compatible store; None: AWS, or what the AWS configuration names.

    Raises:
        ConfigError: The URI has another form.
    """
    parts = urlsplit(uri)
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        return LocalStore(Path(unquote(parts.path)))
    raise ConfigError(f"{uri!r} names no object store: write file:///folder or s3://bucket/prefix")
