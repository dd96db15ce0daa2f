"""A run as its files tell it, for whoever comes after training: merging, publishing, reporting."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from relax_pipeline.checkpoint.manifest import read_manifest
from relax_pipeline.checkpoint.store import CheckpointStore
from relax_pipeline.config import RunConfig
from relax_pipeline.errors import CheckpointError, ConfigError
from relax_pipeline.metrics.log import StepLog, series
from relax_pipeline.publish.card import model_card

_CARD_METRICS = ("reward/mean", "eval/accuracy", "eval/reward")


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run's folder, configuration and one of its checkpoints."""

    folder: Path
    config: RunConfig
    step: int
    checkpoint: Path


def finished_run(output_dir: Path, run_name: str, *, step: int | None) -> FinishedRun:
    """Find a run and a committed checkpoint of it, the newest where no step is named.

    Raises:
        CheckpointError: No such run, or no such checkpoint; lists those there are.
        ConfigError: Its config.json cannot be read.
    """
    folder = output_dir.expanduser().resolve() / run_name
    if not (folder / "config.json").is_file():
        runs = ", ".join(run_names(output_dir)) or "none"
        raise CheckpointError(f"no run {run_name!r} in {folder.parent}; there: {runs}")
    refs = {ref.step: ref for ref in CheckpointStore(folder / "checkpoints").committed()}
    wanted = max(refs, default=None) if step is None else step
    if wanted is None or wanted not in refs:
        raise CheckpointError(
            f"run {run_name!r} has no checkpoint{'' if step is None else f' of step {step}'}; "
            f"there: {', '.join(map(str, sorted(refs))) or 'none yet'}"
        )
    return FinishedRun(folder, _read_config(folder / "config.json"), wanted, refs[wanted].path)


def run_names(output_dir: Path) -> list[str]:
    """Return the runs in a folder, sorted."""
    return sorted(path.parent.name for path in output_dir.expanduser().glob("*/config.json"))


def awaits_publishing(output_dir: Path, run_name: str) -> bool:
    """Return whether a run has done all its steps, is to be published, and its newest checkpoint is not.

    Raises:
        ConfigError: Its config.json cannot be read.
    """
    folder = output_dir.expanduser().resolve() / run_name
    config = _read_config(folder / "config.json")
    refs = CheckpointStore(folder / "checkpoints").committed()
    if not config.publish.enabled or not refs or refs[-1].step < config.steps:
        return False
    record = folder / "PUBLISHED.json"
    return not record.is_file() or json.loads(record.read_text())["step"] != refs[-1].step


def _read_config(file: Path) -> RunConfig:
    try:
        return RunConfig.model_validate_json(file.read_text())
    except ValidationError as error:
        raise ConfigError(f"{file} is no configuration this version reads; correct or remove it: {error}") from error


def describe_model(run: FinishedRun) -> dict[str, str]:
    """Write the model card of a run's merged model and the curves it shows: file name to text."""
    base = Path(run.config.model.path)
    manifest = read_manifest(run.checkpoint)
    rows = [row for row in StepLog(run.folder / "metrics.jsonl").rows() if row["step"] <= run.step]
    curves = {name: series(rows, name) for name in _CARD_METRICS}
    readme = base / "README.md"
    return model_card(
        run_name=run.config.run_name,
        step=run.step,
        base_name=base.name,
        base_digest=manifest.base_digest,
        base_readme=readme.read_text() if readme.is_file() else None,
        config=json.loads((base / "config.json").read_text()),
        lora=run.config.lora.model_dump() if run.config.lora.enabled else None,
        data={
            "Prompts": Path(run.config.data.train.path).name,
            "Fingerprint": manifest.identity.data_fingerprint,
            "Consumed": f"{manifest.epoch} epochs and {manifest.offset} prompts",
        },
        metrics={name: points for name, points in curves.items() if points},
    )
