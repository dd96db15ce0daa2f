"""From a URI to the object store it names."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from relax_pipeline.errors import ConfigError
from relax_pipeline.storage.base import ObjectStore
from relax_pipeline.storage.local import LocalStore
from relax_pipeline.storage.s3 import S3Store


def open_store(uri: str, *, endpoint_url: str | None = None) -> ObjectStore:
    """Return the store that file:///folder or s3://bucket/prefix names; nothing is contacted yet.

    Args:
        uri: Where the store's keys start.
        endpoint_url: Of an S3-compatible store; None: AWS, or what the AWS configuration names.

    Raises:
        ConfigError: The URI or the endpoint has another form.
    """
    if endpoint_url is not None and not endpoint_url.startswith(("http://", "https://")):
        raise ConfigError(f"endpoint_url {endpoint_url!r}: write https://host or http://host:port")
    parts = urlsplit(uri)
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        return LocalStore(Path(unquote(parts.path)))
    if parts.scheme == "s3" and parts.netloc:
        return S3Store(parts.netloc, parts.path, endpoint_url=endpoint_url)
    raise ConfigError(f"{uri!r} names no object store: write file:///folder or s3://bucket/prefix")
