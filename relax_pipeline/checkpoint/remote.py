"""A run's checkpoints in an object store: payload first, each file read back, COMMITTED last.

<store>/<run_name>/step-0000120-<digest12>/   the files of the checkpoint's folder
<store>/<run_name>/metrics.jsonl              as of the newest one, as is changes.json
<store>/<run_name>/owner.json                 see `owner`
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from relax_pipeline.checkpoint.manifest import COMMITTED_FILE, MANIFEST_FILE, Manifest, read_manifest
from relax_pipeline.checkpoint.store import CheckpointRef, CheckpointStore, in_use
from relax_pipeline.errors import CheckpointError
from relax_pipeline.storage.base import ObjectStore
from relax_pipeline.storage.files import sha256_file, write_atomic
from relax_pipeline.storage.sending import PayloadFile, Progress, send_payload

_COMMITTED_KEY = re.compile(rf"([^/]+/step-(\d{{7,}})-[0-9a-f]{{12}})/{COMMITTED_FILE}")


@dataclass(frozen=True, slots=True)
class RemoteRef:
    """A committed checkpoint in a store."""

    step: int
    prefix: str


class RemoteCheckpoints:
    """The checkpoints of one run below a store. All methods raise PublishError where the store fails."""

    def __init__(self, store: ObjectStore, run_name: str) -> None:
        self.store, self.run_name = store, run_name

    def committed(self) -> list[RemoteRef]:
        """Return the committed checkpoints, oldest first."""
        found = (_COMMITTED_KEY.fullmatch(key) for key in self.store.keys(f"{self.run_name}/step-"))
        return sorted((RemoteRef(int(m[2]), m[1]) for m in found if m), key=lambda ref: (ref.step, ref.prefix))

    def upload(self, ref: CheckpointRef, *, may_commit: Callable[[], None], progress: Progress | None = None) -> None:
        """Bring a checkpoint to the store; what is there already is kept.

        Args:
            ref: Of a local checkpoint.
            may_commit: Raises if this process may not; called right before the checkpoint becomes visible.
            progress: Told bytes done and bytes in all; an error it raises ends the upload.

        Raises:
            CheckpointError: It was pruned before it could be sent.
        """
        with in_use(ref):
            manifest_data = (ref.path / MANIFEST_FILE).read_bytes()
            digest = sha256_file(ref.path / MANIFEST_FILE)
            payload = [
                PayloadFile(name, entry.size, entry.sha256, ref.path / name)
                for name, entry in read_manifest(ref.path).files.items()
            ]
            payload.append(PayloadFile(MANIFEST_FILE, len(manifest_data), digest, manifest_data))
            prefix = f"{self.run_name}/{ref.path.name}-{digest[:12]}"
            send_payload(self.store, prefix, payload, progress)
            may_commit()
            self.store.put_bytes(f"{prefix}/{COMMITTED_FILE}", digest.encode())

    def download(self, ref: RemoteRef, local: CheckpointStore) -> CheckpointRef:
        """Bring a checkpoint from the store into a local folder.

        Raises:
            CheckpointError: A file is not the one that was sent, or the disk is full.
        """
        where = f"{self.store.uri}/{ref.prefix}"
        manifest_data = self.store.get_bytes(f"{ref.prefix}/{MANIFEST_FILE}")
        if manifest_data is None:
            raise CheckpointError(f"{where} has no {MANIFEST_FILE}: another process is deleting it")
        manifest = Manifest.model_validate_json(manifest_data)

        def fetch(folder: Path) -> None:
            for name, entry in manifest.files.items():
                file = folder / name
                file.parent.mkdir(parents=True, exist_ok=True)
                self.store.get_file(f"{ref.prefix}/{name}", file)
                if sha256_file(file) != entry.sha256:
                    raise CheckpointError(f"{where}/{name} is not the file that was sent: its sha256 differs")

        return local.save(manifest.model_copy(update={"files": {}}), fetch)

    def prune(self, *, keep_last: int | None, keep_every: int | None) -> None:
        """Delete old checkpoints, each by its COMMITTED first; keep_last None keeps all."""
        steps = sorted({ref.step for ref in self.committed()})
        old = set(steps[:-keep_last] if keep_last else [])
        for ref in self.committed():
            if ref.step in old and not (keep_every and ref.step % keep_every == 0):
                self.store.delete(f"{ref.prefix}/{COMMITTED_FILE}")
                for key in self.store.keys(f"{ref.prefix}/"):
                    self.store.delete(key)

    def send_beside(self, file: Path) -> None:
        """Store a small file of the run beside its checkpoints, if there is one."""
        if file.is_file():
            self.store.put_bytes(f"{self.run_name}/{file.name}", file.read_bytes())

    def fetch_beside(self, file: Path) -> None:
        """Bring a small file of the run, if the store has it, in place of the one here."""
        data = self.store.get_bytes(f"{self.run_name}/{file.name}")
        if data is not None:
            write_atomic(file, data)
