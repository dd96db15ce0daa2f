"""What a checkpoint folder says of itself, and whether a run may continue from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from relax_pipeline.errors import CheckpointError

MANIFEST_FILE = "manifest.json"
COMMITTED_FILE = "COMMITTED"
FORMAT_VERSION = 1


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Format(BaseModel):
    """All that is read of a format that is not known yet."""

    format_version: int


class FileEntry(_Part):
    """One file of a checkpoint."""

    size: int
    sha256: str


class Identity(_Part):
    """What must be the same for a run to continue: everything that decides what the saved numbers mean."""

    base_digest: str
    """sha256 over the base's config.json and weights."""
    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    """Megatron names, sorted."""
    scope: str
    saves_lora_only: bool
    seed: int
    """Decides the order of the prompts."""
    data_fingerprint: str
    """sha256 over the rows and how they are rendered."""
    trainer: str
    """Backend that wrote `trainer/`."""


class Manifest(_Part):
    """manifest.json of one checkpoint."""

    format_version: int = FORMAT_VERSION
    run_name: str
    step: int
    """Steps done; the next one to do."""
    policy_version: int
    """Optimizer steps taken."""
    identity: Identity
    base_digest: str
    """The identity's, again at the top level, for tools that only merge."""
    epoch: int
    offset: int
    """Prompts consumed: the next is row order(seed, epoch)[offset]."""
    run_id: str = ""
    """Names the run in services that draw its curves; the same in all its checkpoints."""
    layout: dict[str, Any]
    """How it was trained. For information: any other layout may continue."""
    files: dict[str, FileEntry] = {}


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint folder.

    Raises:
        CheckpointError: It is missing, damaged, or of a newer format.
    """
    file = folder / MANIFEST_FILE
    try:
        content = file.read_bytes()
        version = _Format.model_validate_json(content).format_version
        if version > FORMAT_VERSION:
            raise CheckpointError(
                f"{folder} has checkpoint format {version}; this version reads up to {FORMAT_VERSION}"
            )
        return Manifest.model_validate_json(content)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no checkpoint: it has no {MANIFEST_FILE}") from None
    except ValidationError as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error


_REMEDIES = {
    "base_digest": "model.path holds another model than the one trained; point it at the base of this run",
    "rank": "set lora.rank back",
    "alpha": "set lora.alpha back",
    "target_modules": "set lora.target_modules back",
    "scope": "set lora.scope back",
    "saves_lora_only": "set checkpoint.save_lora_only back",
    "seed": "set seed back: it decides which prompts were already seen",
    "data_fingerprint": "the prompts or how they are rendered have changed; restore them",
    "trainer": "set trainer.kind back",
}


def check_continues(saved: Identity, current: Identity, *, folder: Path) -> None:
    """Refuse to continue a run that would not be the same run.

    Raises:
        CheckpointError: Lists each difference with both values and the remedy.
    """
    lines = [
        f"  {name}: checkpoint {getattr(saved, name)!r}, this run {getattr(current, name)!r}; {remedy}"
        for name, remedy in _REMEDIES.items()
        if getattr(saved, name) != getattr(current, name)
    ]
    if lines:
        raise CheckpointError(
            f"{folder} cannot be continued with this configuration:\n"
            + "\n".join(lines)
            + "\n  or train under another run_name, or with --fresh"
        )
