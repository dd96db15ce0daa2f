"""The training flow: one flow run is one attempt at a named run, and every attempt begins at the newest checkpoint."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from prefect import State, flow
from prefect.logging import get_run_logger

from flows.cancelling import save_if_cancelled
from flows.giving_up import give_up_on_user_errors
from flows.pausing import agreed, pause
from flows.progress import StepProgress
from relax_pipeline.config import RunConfig
from relax_pipeline.metrics.report import write_report
from relax_pipeline.metrics.tracking.trackers import check_installed
from relax_pipeline.session.pause import take_request
from tasks import training
from tasks.watching import Watch

if TYPE_CHECKING:
    from relax_pipeline.session.session import TrainingSession


@flow(
    name="relax-train",
    flow_run_name="train-{config.run_name}",
    retries=2,
    retry_delay_seconds=2,
    persist_result=False,
    validate_parameters=True,
)
def train_policy(config: RunConfig) -> dict[str, Any] | State[Any]:
    """Train a LoRA policy and return where its files are.

    Retried by itself after a failure of trainer or engines; a wrong setting is not retried.
    """
    # These load torch, which whoever only deploys this flow, or calls its hooks, need not.
    from relax_pipeline.build import open_session  # noqa: PLC0415
    from relax_pipeline.inputs import run_folder  # noqa: PLC0415

    log, folder = get_run_logger(), run_folder(config)
    paused = False
    with ExitStack() as stack:
        stack.enter_context(give_up_on_user_errors())
        config = agreed(config, folder)
        check_installed(config.tracking.trackers)
        session = stack.enter_context(open_session(config))
        restored = training.restore(session)
        step = restored["step"]
        log.info("step %d of %d, from %s", step, config.steps, restored["checkpoint"] or "the base")
        for problem in restored["passed_over"]:
            log.warning("a damaged checkpoint was passed over: %s", problem)
        stack.enter_context(save_if_cancelled(session))
        watch = Watch(session, step=step)
        stack.callback(watch.close)
        progress = stack.enter_context(StepProgress(config, step=step))
        training.sync(session, step)
        if step == 0 and config.evaluation:
            training.evaluate(session, 0)
            watch.step(0, session.finish_step(0))
        while step < config.steps and not paused:
            step += 1
            row = _train_step(session, step)
            progress.finish(step, row)
            watch.step(step, row)
            paused = take_request(folder) and step < config.steps
            if paused or config.saves_at(step):
                training.save(session, step)
        if session.saves.is_writing:
            training.commit(session)
        if not paused:
            session.check_learned()
        training.send(session)
    if paused:
        return pause(config, folder, step)
    return {"run_folder": str(folder), "step": step, "report": str(write_report(folder))}


def _train_step(session: TrainingSession, step: int) -> dict[str, float]:
    """Take one step from prompts to engines that run the new policy; return its row."""
    training.rollout(session, step)
    training.reward(session, step)
    training.train(session, step)
    training.sync(session, step)
    if session.saves.is_writing:
        training.commit(session)
    if session.config.evaluates_at(step):
        training.evaluate(session, step)
    return session.finish_step(step)
