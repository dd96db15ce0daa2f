"""A run as its files tell it, for whoever comes after training: merging, publishing, reporting."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from relax_pipeline.checkpoint.manifest import read_manifest
from relax_pipeline.checkpoint.store import CheckpointStore
from relax_pipeline.config import RunConfig
from relax_pipeline.errors import CheckpointError
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
    """
    folder = output_dir.expanduser().resolve() / run_name
    if not (folder / "config.json").is_file():
        runs = sorted(path.parent.name for path in folder.parent.glob("*/config.json"))
        raise CheckpointError(f"no run {run_name!r} in {folder.parent}; there: {', '.join(runs) or 'none'}")
    refs = {ref.step: ref for ref in CheckpointStore(folder / "checkpoints").committed()}
    wanted = max(refs, default=None) if step is None else step
    if wanted is None or wanted not in refs:
        raise CheckpointError(
            f"run {run_name!r} has no checkpoint{'' if step is None else f' of step {step}'}; "
            f"there: {', '.join(map(str, sorted(refs))) or 'none yet'}"
        )
    config = RunConfig.model_validate_json((folder / "config.json").read_text())
    return FinishedRun(folder, config, wanted, refs[wanted].path)


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
