"""Evaluation of a checkpoint as a task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from relax_pipeline.checkpoint.store import CheckpointRef
from relax_pipeline.config import EvalConfig
from relax_pipeline.metrics.log import StepLog
from tasks.artifacts import artifact_key

if TYPE_CHECKING:
    from relax_pipeline.finished import FinishedRun


@task(task_run_name="evaluate-{run.step}", cache_policy=NO_CACHE, persist_result=False)
def evaluate(run: FinishedRun, evaluation: EvalConfig | None) -> dict[str, float]:
    """Answer held-out prompts from a checkpoint."""
    from relax_pipeline.evaluation import evaluate_checkpoint  # noqa: PLC0415 - loads torch

    return evaluate_checkpoint(run.config, CheckpointRef(run.step, run.checkpoint), evaluation=evaluation)


@task(task_run_name="record-{run.step}", cache_policy=NO_CACHE, persist_result=False)
def record(run: FinishedRun, metrics: dict[str, float]) -> None:
    """Note the figures in evaluations.jsonl of the run, and show them."""
    StepLog(run.folder / "evaluations.jsonl").append(run.step, metrics)
    rows = [{"metric": name, "value": value} for name, value in metrics.items()]
    create_table_artifact(
        rows, key=artifact_key(run.config.run_name, "evaluation"), description=f"Evaluation of step {run.step}"
    )
