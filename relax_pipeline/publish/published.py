"""Reading side: which models are published, and whether one is intact."""

from __future__ import annotations

from dataclasses import dataclass

from relax_pipeline.errors import PublishError
from relax_pipeline.publish.manifest import (
    LATEST,
    MANIFEST,
    MANIFEST_KEY,
    LatestPointer,
    Manifest,
    files_digest,
    read_record,
)
from relax_pipeline.storage.base import ObjectStore
from relax_pipeline.storage.stores import open_store


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """One published model."""

    uri: str
    run_name: str
    step: int
    digest: str
    created: str
    """UTC, ISO 8601."""
    num_files: int
    num_bytes: int
    is_latest: bool
    """Whether the run's latest.json points here."""


def list_published(
    destination: str, *, run_name: str | None = None, endpoint_url: str | None = None
) -> list[PublishedModel]:
    """Return the models below a destination that have a manifest, by run, step and time; of one run if given.

    Raises:
        PublishError: The store failed, or a manifest cannot be read.
    """
    store = open_store(destination, endpoint_url=endpoint_url)
    manifests = published_in(store, run_name=run_name)
    latest = {name: _latest_prefix(store, name) for name in {manifest.run_name for manifest in manifests}}
    return [
        _describe(f"{store.uri}/{manifest.prefix}", manifest, is_latest=manifest.prefix == latest[manifest.run_name])
        for manifest in manifests
    ]


def published_in(store: ObjectStore, *, run_name: str | None = None) -> list[Manifest]:
    """Return the manifests in a store, by run, step and time; of one run if given."""
    keys = [key for key in store.keys(f"{run_name}/" if run_name else "") if MANIFEST_KEY.fullmatch(key)]
    manifests = [manifest for key in keys if (manifest := read_record(store, key, Manifest))]
    return sorted(manifests, key=lambda manifest: (manifest.run_name, manifest.step, manifest.created))


def verify_published(uri: str, *, endpoint_url: str | None = None) -> PublishedModel:
    """Read a published model back and compare every file's size and sha256 with its manifest.

    Args:
        uri: Of the model's own folder, as `list_published` gives it.
        endpoint_url: Of an S3-compatible store; None: AWS.

    Raises:
        PublishError: There is no manifest, or files are missing, differ, or are not in it: all are named.
    """
    store = open_store(uri.rstrip("/"), endpoint_url=endpoint_url)
    manifest = read_record(store, MANIFEST, Manifest)
    if manifest is None:
        raise PublishError(
            f"{store.uri} has no {MANIFEST}: nothing is published there, or publishing was interrupted; "
            "`relax-pipeline published ls` lists what is"
        )
    if problems := find_problems(store, manifest):
        raise PublishError(f"{store.uri} is damaged: {'; '.join(problems)}. Delete {MANIFEST} and publish again")
    destination = store.uri.removesuffix(f"/{manifest.prefix}")
    if destination == store.uri:  # a copy under another name: no pointer can name it
        return _describe(store.uri, manifest, is_latest=False)
    latest = _latest_prefix(open_store(destination, endpoint_url=endpoint_url), manifest.run_name)
    return _describe(store.uri, manifest, is_latest=manifest.prefix == latest)


def find_problems(store: ObjectStore, manifest: Manifest, *, prefix: str = "") -> list[str]:
    """Compare every file below a prefix ('' or ending in '/') with a manifest, and say what differs."""
    there = {key.removeprefix(prefix) for key in store.keys(prefix)} - {MANIFEST}
    problems = [f"{name} is not in the manifest" for name in sorted(there - {file.name for file in manifest.files})]
    if files_digest(manifest.files) != manifest.digest:
        problems.append("the manifest's digest is not that of its files")
    for file in manifest.files:
        info = store.head(prefix + file.name)
        if info is None:
            problems.append(f"{file.name} is missing")
        elif info.size != file.size:
            problems.append(f"{file.name} has {info.size} bytes instead of {file.size}")
        elif (found := store.sha256(prefix + file.name)) != file.sha256:
            problems.append(f"{file.name} has sha256 {found} instead of {file.sha256}")
    return problems


def _latest_prefix(store: ObjectStore, run_name: str) -> str | None:
    pointer = read_record(store, f"{run_name}/{LATEST}", LatestPointer)
    return pointer.prefix if pointer else None


def _describe(uri: str, manifest: Manifest, *, is_latest: bool) -> PublishedModel:
    return PublishedModel(
        uri=uri,
        run_name=manifest.run_name,
        step=manifest.step,
        digest=manifest.digest,
        created=manifest.created,
        num_files=len(manifest.files),
        num_bytes=manifest.num_bytes,
        is_latest=is_latest,
    )
