"""The evaluation flow: how good is a checkpoint, on the run's held-out prompts or on others."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from flows.giving_up import give_up_on_user_errors
from relax_pipeline.config import EvalConfig
from relax_pipeline.finished import finished_run
from tasks import evaluating


@flow(name="relax-evaluate", flow_run_name="evaluate-{run_name}", persist_result=False)
def evaluate(
    run_name: str, *, output_dir: str = "runs", step: int | None = None, evaluation: EvalConfig | None = None
) -> dict[str, float]:
    """Answer held-out prompts from a checkpoint of a run, whether or not the run goes on meanwhile.

    Args:
        run_name: The training run.
        output_dir: Where runs lie.
        step: Checkpoint to evaluate; none: the newest.
        evaluation: Other prompts, or another way to answer them, than the run's own; none: the run's.
    """
    with give_up_on_user_errors():
        run = finished_run(Path(output_dir), run_name, step=step)
        metrics = evaluating.evaluate(run, evaluation)
        evaluating.record(run, metrics)
    return metrics
