"""Publishing: payload first, each object read back, then the manifest, then the pointer."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from relax_pipeline.errors import ConfigError, PublishError
from relax_pipeline.publish.manifest import (
    LATEST,
    MANIFEST,
    FileEntry,
    LatestPointer,
    Manifest,
    files_digest,
    read_record,
    write_record,
)
from relax_pipeline.publish.payload import collect_payload
from relax_pipeline.storage.base import ObjectStore
from relax_pipeline.storage.sending import PayloadFile, Progress, send_payload
from relax_pipeline.storage.stores import open_store

Outcome = Literal["published", "already_published", "published_by_other"]


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What publishing did. The model is complete and verified at `uri` whatever the outcome."""

    uri: str
    digest: str
    outcome: Outcome
    num_files: int
    num_bytes: int
    bytes_sent: int
    """By this call; less than num_bytes where an earlier attempt left whole files."""
    latest_moved: bool
    seconds: float
    notes: tuple[str, ...] = ()
    """What did not succeed and does not make the model any less published."""


def publish_model(
    folder: Path,
    destination: str,
    *,
    run_name: str,
    step: int,
    endpoint_url: str | None = None,
    progress: Progress | None = None,
    card: Mapping[str, str] | None = None,
    update_latest: bool = True,
) -> PublishReport:
    """Publish a merged model under `<destination>/<run_name>/step-<step>-<digest>/`.

    Doing it again does nothing; after an interruption it sends what is not there yet.

    Args:
        folder: The merged model.
        destination: file:///folder or s3://bucket/prefix.
        run_name: The training run it comes from.
        step: Training steps it has taken.
        endpoint_url: Of an S3-compatible store; None: AWS.
        progress: Told bytes done and bytes in all.
        card: Files to publish with it, or instead of the folder's: what `model_card` returns.
        update_latest: Point the run's latest.json here, unless it points to a later model.

    Raises:
        ConfigError: The destination or the run's name is malformed.
        PublishError: The folder is no complete model, or the store failed; the cause is attached.
    """
    store = open_store(destination, endpoint_url=endpoint_url)
    return publish_to(
        store, folder, run_name=run_name, step=step, progress=progress, card=card, update_latest=update_latest
    )


def publish_to(
    store: ObjectStore,
    folder: Path,
    *,
    run_name: str,
    step: int,
    progress: Progress | None = None,
    card: Mapping[str, str] | None = None,
    update_latest: bool = True,
) -> PublishReport:
    """Publish into an open store; see `publish_model`."""
    started = time.monotonic()
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run_name) or step < 0:
        raise ConfigError(f"run {run_name!r}, step {step}: a run's name is a folder name, and steps count from 0")
    payload = collect_payload(folder, card or {})
    mine = _manifest(payload, run_name, step)
    there = read_record(store, f"{mine.prefix}/{MANIFEST}", Manifest)
    outcome: Outcome = "already_published"
    bytes_sent = 0
    if there is None:
        bytes_sent = send_payload(store, mine.prefix, payload, progress)
        there = _commit(store, mine)
        outcome = "published" if there.attempt == mine.attempt else "published_by_other"
    if there.files != mine.files:
        raise PublishError(f"{store.uri}/{mine.prefix} lists other files than {folder}; delete it if it is not wanted")
    latest_moved = update_latest and _move_latest(store, there)
    return PublishReport(
        uri=f"{store.uri}/{mine.prefix}",
        digest=mine.digest,
        outcome=outcome,
        num_files=len(mine.files),
        num_bytes=mine.num_bytes,
        bytes_sent=bytes_sent,
        latest_moved=latest_moved,
        notes=_tidy(store, mine.prefix),
        seconds=time.monotonic() - started,
    )


def _manifest(payload: list[PayloadFile], run_name: str, step: int) -> Manifest:
    files = tuple(FileEntry(name=file.name, size=file.size, sha256=file.sha256) for file in payload)
    return Manifest(
        run_name=run_name,
        step=step,
        digest=files_digest(files),
        created=datetime.now(UTC).isoformat(timespec="microseconds"),
        attempt=uuid.uuid4().hex,
        files=files,
    )


def _commit(store: ObjectStore, manifest: Manifest) -> Manifest:
    """Write the manifest if there is none, and return the one that holds, as it reads back."""
    key = f"{manifest.prefix}/{MANIFEST}"
    # Refused where another publisher was faster, and also where our own write arrived and its answer was lost:
    # the attempt in what reads back tells.
    write_record(store, key, manifest)
    there = read_record(store, key, Manifest)
    if there is None:
        raise PublishError(f"{store.uri}/{key} was there and is gone: another process deletes it; publish again")
    return there


def _move_latest(store: ObjectStore, manifest: Manifest) -> bool:
    """Point latest.json at a model unless it names this or a later one; return whether it was moved."""
    key = f"{manifest.run_name}/{LATEST}"
    pointer = LatestPointer(step=manifest.step, created=manifest.created, prefix=manifest.prefix)
    tried = False
    while True:
        info = store.head(key)
        current = read_record(store, key, LatestPointer) if info else None
        if current and current.order >= pointer.order:
            return tried and current == pointer
        tried = True
        # A pointer that another publisher has moved since `head` has another version: look again.
        if write_record(store, key, pointer, if_match=info.version if info else None):
            return True


def _tidy(store: ObjectStore, prefix: str) -> tuple[str, ...]:
    """Free what killed attempts left; a note where the store does not allow it."""
    try:
        store.discard_partial(prefix)
    except PublishError as error:
        return (f"leftovers of interrupted uploads were not removed: {error}",)
    return ()
