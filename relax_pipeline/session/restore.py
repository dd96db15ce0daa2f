"""Where a run goes on: at its newest intact checkpoint, or at the base or the adapter it starts from."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from relax_pipeline.checkpoint.manifest import Identity, check_continues, read_manifest
from relax_pipeline.checkpoint.store import CheckpointRef, CheckpointStore
from relax_pipeline.errors import CheckpointError
from relax_pipeline.metrics.log import StepLog
from relax_pipeline.session.pause import read_changes
from relax_pipeline.trainer.base import Trainer
from relax_pipeline.types import DataPosition


@dataclass(frozen=True, slots=True)
class Restored:
    """Where a session starts."""

    step: int
    """Steps done."""
    policy_version: int
    position: DataPosition
    """Of the first prompt to draw."""
    run_id: str
    """The checkpoint's; new where a run begins."""
    checkpoint: CheckpointRef | None
    """None: from the base or lora.start_from."""
    passed_over: tuple[str, ...]
    """Newer checkpoints that were damaged, and how."""


def restore(trainer: Trainer, checkpoints: CheckpointStore, identity: Identity, start_from: str | None) -> Restored:
    """Bring a new trainer to where the run is.

    Args:
        trainer: At the base.
        checkpoints: Of the run.
        identity: Of the run as it is configured now.
        start_from: Folder of an adapter, for a run without checkpoints.

    Raises:
        AdapterError: The adapter does not fit.
        CheckpointError: All checkpoints are damaged, or this configuration cannot continue them.
    """
    passed_over: list[str] = []
    ref = checkpoints.newest_intact(lambda error: passed_over.append(str(error)))
    if ref is None:
        if start_from is not None:
            trainer.start_from(Path(start_from))
        return Restored(0, trainer.policy_version(), DataPosition(), uuid4().hex, None, ())
    manifest = read_manifest(ref.path)
    check_continues(manifest.identity, identity, folder=ref.path)
    trainer.load(ref.path)
    version = trainer.policy_version()
    if version != manifest.policy_version:
        raise CheckpointError(
            f"{ref.path}: the trainer loaded policy version {version}, the manifest says {manifest.policy_version}"
        )
    position = DataPosition(manifest.epoch, manifest.offset)
    return Restored(ref.step, version, position, manifest.run_id or uuid4().hex, ref, tuple(passed_over))


def note_attempt(run_folder: Path, step: int) -> None:
    """Add to attempts.jsonl that the run goes on after this step, since when, and with which changed settings."""
    started = datetime.now(UTC).isoformat(sep=" ", timespec="seconds")
    StepLog(run_folder / "attempts.jsonl").append(step, {"started": started, "changes": read_changes(run_folder)})
