"""The phases of a training run as tasks. What they return is small and for people; the truth is the checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefect import State, task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from relax_pipeline.errors import SyncError, TrainerError
from tasks.events import announce

if TYPE_CHECKING:
    from relax_pipeline.checkpoint.store import CheckpointRef
    from relax_pipeline.session.session import TrainingSession

_RETRY_SECONDS = [1.0, 5.0, 20.0]


def _could_save_yet(_task: object, _run: object, state: State[Any]) -> bool:
    """Not without its trainer, which only another attempt of the flow brings back."""
    return not isinstance(state.data, TrainerError)


@task(task_run_name="restore", cache_policy=NO_CACHE, persist_result=False)
def restore(session: TrainingSession) -> dict[str, Any]:
    """Continue from the newest intact checkpoint, or start from the base."""
    restored = session.restore()
    return {
        "step": restored.step,
        "policy_version": restored.policy_version,
        "checkpoint": str(restored.checkpoint.path) if restored.checkpoint else None,
        "passed_over": list(restored.passed_over),
    }


@task(task_run_name="sync-{step}", cache_policy=NO_CACHE, persist_result=False)
def sync(session: TrainingSession, step: int) -> dict[str, float]:
    """Bring the engines to the trainer's policy and verify that they run it."""
    run_name = session.config.run_name
    try:
        report = session.sync()
    except SyncError as error:
        announce("sync.failed", run_name, {"step": step, "reason": str(error)})
        raise
    for engine, reason in report.quarantined.items():
        get_run_logger().warning("engine %s is out of service: %s", engine, reason)
        announce("sync.failed", run_name, {"step": step, "engine": engine, "reason": reason})
    return report.metrics()


@task(task_run_name="rollout-{step}", cache_policy=NO_CACHE, persist_result=False)
def rollout(session: TrainingSession, step: int) -> dict[str, float]:
    """Generate the step's completions."""
    return session.rollout(step)


@task(task_run_name="reward-{step}", cache_policy=NO_CACHE, persist_result=False)
def reward(session: TrainingSession, step: int) -> dict[str, float]:
    """Score them, and draw again for groups that carry no gradient."""
    return session.score(step)


@task(task_run_name="train-{step}", cache_policy=NO_CACHE, persist_result=False)
def train(session: TrainingSession, step: int) -> dict[str, float]:
    """Take the optimizer steps."""
    return session.train(step)


@task(task_run_name="evaluate-{step}", cache_policy=NO_CACHE, persist_result=False)
def evaluate(session: TrainingSession, step: int) -> dict[str, float]:
    """Answer the held-out prompts."""
    return session.evaluate()


@task(
    task_run_name="save-{step}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=len(_RETRY_SECONDS),
    retry_delay_seconds=_RETRY_SECONDS,
    retry_condition_fn=_could_save_yet,
)
def save(session: TrainingSession, step: int) -> dict[str, Any]:
    """Write a checkpoint, or begin to; the only phase that may be repeated as it is."""
    return _committed(session, session.save(step))


@task(task_run_name="commit", cache_policy=NO_CACHE, persist_result=False)
def commit(session: TrainingSession) -> dict[str, Any]:
    """Wait until the checkpoint that was begun is written; from then on it counts."""
    return _committed(session, session.commit())


@task(task_run_name="send", cache_policy=NO_CACHE, persist_result=False)
def send(session: TrainingSession) -> None:
    """Wait until the last checkpoint is in checkpoint.store, if there is one."""
    session.saves.wait_until_sent()


def _committed(session: TrainingSession, ref: CheckpointRef | None) -> dict[str, Any]:
    """Tell everyone of a checkpoint that counts; of none, nobody."""
    if ref is None:
        return {}
    saved = {"step": ref.step, "path": str(ref.path)}
    announce("checkpoint.committed", session.config.run_name, saved)
    return saved
