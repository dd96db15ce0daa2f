"""An object store in an S3 bucket, of AWS or of anything that speaks its protocol."""

from __future__ import annotations

import hashlib
import mimetypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

from relax_pipeline.errors import PublishError
from relax_pipeline.storage.base import ObjectInfo
from relax_pipeline.storage.s3_bucket import Bucket
from relax_pipeline.storage.s3_multipart import abort_upload, byte_ranges, put_parts

_ABSENT = frozenset({"404", "NoSuchKey"})
_CONDITION_FAILED = frozenset({"412", "PreconditionFailed", "NoSuchKey"})


class S3Store:
    """Objects below s3://bucket/prefix; see ObjectStore for the contract.

    Files larger than a part go up, and all objects come back, in parts: up to `threads` each way at a time, so that at
    most twice as many parts are in memory.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint_url: str | None = None,
        deadline_s: float = 300.0,
        part_size: int = 16 * 2**20,
        threads: int = 8,
    ) -> None:
        self._bucket = Bucket(bucket, prefix, connect=lambda: _connect(endpoint_url, threads), deadline_s=deadline_s)
        self._part_size = part_size
        self._threads = threads
        # Apart, so that what is read back need not wait until all that is queued for upload has gone.
        self._up = ThreadPoolExecutor(threads, thread_name_prefix="s3-up")
        self._down = ThreadPoolExecutor(threads, thread_name_prefix="s3-down")

    @property
    def uri(self) -> str:
        """Bucket and prefix as s3:// URI."""
        return self._bucket.uri

    def put_file(self, key: str, path: Path, *, sha256: str, sent: Callable[[int], None]) -> None:
        """Upload a file, in parallel parts if it is larger than one; an upload that fails is aborted."""
        size = path.stat().st_size
        if size <= self._part_size:
            data = path.read_bytes()
            self._bucket.call(
                key, lambda s3: s3.put_object(**self._bucket.where(key), **_about(key, sha256), Body=data)
            )
            sent(size)
        elif not put_parts(
            self._bucket, key, path, about=_about(key, sha256), part_size=self._part_size, pool=self._up, sent=sent
        ):
            # The object is there if the answer to completing it was lost, or another publisher of the same was faster.
            there = self.head(key)
            if there is None or (there.size, there.sha256) != (size, sha256):
                raise PublishError(f"{self.uri}/{key}: another process aborted this upload; publish again")

    def put_bytes(self, key: str, data: bytes, *, if_none_match: bool = False, if_match: str | None = None) -> bool:
        """Write a small object; the store decides the conditions."""
        request = {**self._bucket.where(key), **_about(key, hashlib.sha256(data).hexdigest()), "Body": data}
        if if_none_match:
            request["IfNoneMatch"] = "*"
        if if_match is not None:
            request["IfMatch"] = if_match
        return self._bucket.call_unless(_CONDITION_FAILED, key, lambda s3: s3.put_object(**request)) is not None

    def get_bytes(self, key: str) -> bytes | None:
        """Read a small object; None: there is none."""
        where = self._bucket.where(key)
        return self._bucket.call_unless(_ABSENT, key, lambda s3: _read(s3.get_object(**where)))

    def head(self, key: str) -> ObjectInfo | None:
        """Describe an object; None: there is none."""
        where = self._bucket.where(key)
        answer = self._bucket.call_unless(_ABSENT, key, lambda s3: s3.head_object(**where))
        return ObjectInfo(answer["ContentLength"], answer["Metadata"].get("sha256"), answer["ETag"]) if answer else None

    def sha256(self, key: str) -> str:
        """Read an object back, some parts at a time, and hash it."""
        digest = hashlib.sha256()
        for data in self._parts(key):
            digest.update(data)
        return digest.hexdigest()

    def get_file(self, key: str, path: Path) -> None:
        """Download an object, some parts at a time."""
        with path.open("wb") as file:
            for data in self._parts(key):
                file.write(data)

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that start with a prefix, sorted."""
        entries = self._bucket.entries("list_objects_v2", "Contents", prefix)
        return sorted(self._bucket.relative(entry["Key"]) for entry in entries)

    def delete(self, key: str) -> None:
        """Remove an object, if it is there."""
        self._bucket.call(key, lambda s3: s3.delete_object(**self._bucket.where(key)))

    def discard_partial(self, prefix: str) -> None:
        """Abort every multipart upload below a prefix."""
        for upload in self._bucket.entries("list_multipart_uploads", "Uploads", f"{prefix}/"):
            abort_upload(self._bucket, self._bucket.relative(upload["Key"]), upload["UploadId"])

    def _parts(self, key: str) -> Iterator[bytes]:
        info = self.head(key)
        if info is None:
            raise PublishError(f"{self.uri}/{key} is gone: another process deleted it")
        ranges = list(byte_ranges(info.size, self._part_size))
        for first in range(0, len(ranges), self._threads):
            yield from self._down.map(lambda p: self._get_range(key, *p), ranges[first : first + self._threads])

    def _get_range(self, key: str, start: int, length: int) -> bytes:
        request = {**self._bucket.where(key), "Range": f"bytes={start}-{start + length - 1}"}
        return self._bucket.call(key, lambda s3: _read(s3.get_object(**request)))


def _connect(endpoint_url: str | None, threads: int) -> Any:
    """Return a client with the standard chain's credentials and region, as they are now."""
    session = boto3.session.Session()
    # Many stores beside AWS reject the checksum trailers boto3 adds by default, and names in the host part.
    compatible: dict[str, Any] = {
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "s3": {"addressing_style": "path"},
    }
    config = Config(
        retries={"total_max_attempts": 1},  # ours has a deadline instead
        max_pool_connections=2 * threads + 2,
        connect_timeout=10,
        read_timeout=60,
        **(compatible if endpoint_url else {}),
    )
    region = session.region_name or "us-east-1"
    return session.client("s3", endpoint_url=endpoint_url, region_name=region, config=config)


def _read(answer: Any) -> bytes:
    with closing(answer["Body"]) as body:  # not `with body`: that hands out the raw stream and its raw errors
        data: bytes = body.read()
    return data


def _about(key: str, sha256: str) -> dict[str, Any]:
    content_type = mimetypes.guess_type(key)[0] or "application/octet-stream"
    return {"ContentType": content_type, "Metadata": {"sha256": sha256}}
