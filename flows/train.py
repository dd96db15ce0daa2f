"""The training flow: one flow run is one attempt at a named run, and every attempt begins at the newest checkpoint."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from prefect import flow
from prefect.logging import get_run_logger

from flows.cancelling import save_if_cancelled
from flows.giving_up import give_up_on_user_errors
from flows.progress import StepProgress
from relax_pipeline.config import RunConfig
from relax_pipeline.metrics.report import write_report
from tasks import training
from tasks.watching import Watch


@flow(
    name="relax-train",
    flow_run_name="train-{config.run_name}",
    retries=2,
    retry_delay_seconds=2,
    persist_result=False,
    validate_parameters=True,
)
def train_policy(config: RunConfig) -> dict[str, Any]:
    """Train a LoRA policy and return where its files are.

    Retried by itself after a failure of trainer or engines; a wrong setting is not retried.
    """
    # Loads torch, which whoever only deploys this flow, or calls its hooks, need not.
    from relax_pipeline.build import open_session  # noqa: PLC0415

    log = get_run_logger()
    with ExitStack() as stack:
        stack.enter_context(give_up_on_user_errors())
        session = stack.enter_context(open_session(config))
        restored = training.restore(session)
        first = restored["step"] + 1
        log.info("step %d of %d, from %s", restored["step"], config.steps, restored["checkpoint"] or "the base")
        for problem in restored["passed_over"]:
            log.warning("a damaged checkpoint was passed over: %s", problem)
        stack.enter_context(save_if_cancelled(session))
        watch = Watch(session, step=restored["step"])
        stack.callback(watch.close)
        progress = stack.enter_context(StepProgress(config, step=restored["step"]))
        training.sync(session, restored["step"])
        if first == 1 and config.evaluation:
            training.evaluate(session, 0)
            watch.step(0, session.finish_step(0))
        for step in range(first, config.steps + 1):
            training.rollout(session, step)
            training.reward(session, step)
            training.train(session, step)
            training.sync(session, step)
            if config.evaluates_at(step):
                training.evaluate(session, step)
            row = session.finish_step(step)
            progress.finish(step, row)
            watch.step(step, row)
            if config.saves_at(step):
                training.save(session, step)
        session.check_learned()
        training.send(session)
    report = write_report(session.run_folder)
    return {"run_folder": str(session.run_folder), "step": config.steps, "report": str(report)}
