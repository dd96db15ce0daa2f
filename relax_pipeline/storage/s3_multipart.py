"""Uploading one large file in parallel parts, and leaving nothing behind where that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from relax_pipeline.errors import PublishError
from relax_pipeline.storage.s3_bucket import Bucket

_MAX_PARTS = 10_000
_ABORT_DEADLINE_S = 5.0
_NO_UPLOAD = frozenset({"NoSuchUpload"})


def put_parts(
    bucket: Bucket,
    key: str,
    path: Path,
    *,
    about: Mapping[str, Any],
    part_size: int,
    pool: ThreadPoolExecutor,
    sent: Callable[[int], None],
) -> bool:
    """Upload a file; each thread of the pool holds one part in memory.

    Args:
        bucket: Where to.
        key: The object's key.
        path: The file.
        about: Content type and metadata of the object.
        part_size: Bytes; more where the file would have too many parts.
        pool: Runs the parts.
        sent: Told the bytes of each part that arrived.

    Returns:
        False where the store has forgotten the upload: it was aborted, or completed and the answer was lost.

    Raises:
        PublishError: The store failed. The upload is aborted; where that fails too, a note says so.
    """
    start = bucket.call(key, lambda s3: s3.create_multipart_upload(**bucket.where(key), **about))
    target = {**bucket.where(key), "UploadId": start["UploadId"]}
    try:
        parts = _send_parts(bucket, target, path, part_size=part_size, pool=pool, sent=sent)
        if None in parts:
            return False
        request = {**target, "MultipartUpload": {"Parts": parts}}
        done = bucket.call_unless(_NO_UPLOAD, key, lambda s3: s3.complete_multipart_upload(**request))
    except BaseException as error:
        try:
            abort_upload(bucket, key, target["UploadId"], deadline_s=min(bucket.deadline_s, _ABORT_DEADLINE_S))
        except PublishError as second:
            error.add_note(f"and the interrupted upload could not be removed: {second}")
        raise
    return done is not None


def abort_upload(bucket: Bucket, key: str, upload_id: str, *, deadline_s: float | None = None) -> None:
    """Free an upload's parts, if it still exists."""
    target = {**bucket.where(key), "UploadId": upload_id}
    bucket.call_unless(_NO_UPLOAD, key, lambda s3: s3.abort_multipart_upload(**target), deadline_s=deadline_s)


def byte_ranges(size: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of consecutive ranges that cover `size` bytes."""
    for start in range(0, size, length):
        yield start, min(length, size - start)


def _send_parts(
    bucket: Bucket,
    target: Mapping[str, Any],
    path: Path,
    *,
    part_size: int,
    pool: ThreadPoolExecutor,
    sent: Callable[[int], None],
) -> list[dict[str, Any] | None]:
    """Send all parts; None stands for one whose upload the store does not know."""

    def send(number: int, start: int, length: int) -> dict[str, Any] | None:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(length)
        request = {**target, "PartNumber": number, "Body": data}
        answer = bucket.call_unless(_NO_UPLOAD, key, lambda s3: s3.upload_part(**request))
        if answer is None:
            return None
        sent(length)
        return {"PartNumber": number, "ETag": answer["ETag"]}

    key, size = bucket.relative(target["Key"]), path.stat().st_size
    ranges = byte_ranges(size, max(part_size, -(-size // _MAX_PARTS)))
    futures = [pool.submit(send, number, *part) for number, part in enumerate(ranges, 1)]
    try:
        failed = [future for future in wait(futures, return_when=FIRST_EXCEPTION).done if future.exception()]
        return [future.result() for future in (failed or futures)]
    finally:
        for future in futures:
            future.cancel()
        # A part that arrives after the abort would stay in the bucket, unseen and paid for.
        wait(futures)
