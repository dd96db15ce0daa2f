"""Pausing a training run: suspended without its processes, and on Resume asked what is to change.

The flow's parameters stay as they were; the changes are in changes.json of the run and hold for every later attempt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

from prefect import State
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from prefect.logging import get_run_logger
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled
from pydantic import BaseModel

from relax_pipeline.checkpoint.lock import run_lock
from relax_pipeline.checkpoint.mirror import fetch_changes
from relax_pipeline.config import RunConfig
from relax_pipeline.errors import ConfigError
from relax_pipeline.session.pause import apply_changes, change_config
from relax_pipeline.storage.files import write_atomic

_PAUSED_FILE = "paused.json"


class PauseForm(RunInput):
    """What Resume asks for in the UI; filled in with what holds."""

    learning_rate: float
    steps: int
    stop_now: bool = False


class _Paused(BaseModel):
    """paused.json: a pause that was reached and not yet ended by a valid form."""

    flow_run_id: str
    step: int
    key: str
    """Prefect keeps the form's answer under it."""
    refused: str = ""
    """Why the form is shown again."""


def agreed(config: RunConfig, run_folder: Path) -> RunConfig:
    """Return the configuration that holds: as given, with what was changed at pauses.

    If this flow run is paused, what its form brought is taken in; if that is refused, the flow run is suspended again.

    Raises:
        RunLockedError: Another process trains this run: what it goes by is left alone.
        PublishError: checkpoint.store failed.
    """
    with run_lock(run_folder):
        fetch_changes(config.checkpoint, config.run_name, run_folder)
        return _agreed(config, run_folder)


def _agreed(config: RunConfig, run_folder: Path) -> RunConfig:
    config = apply_changes(config, run_folder)
    file = run_folder / _PAUSED_FILE
    paused = _Paused.model_validate_json(file.read_text()) if file.exists() else None
    if paused is None:
        return config
    if paused.flow_run_id != flow_run.id:  # started anew instead of resumed
        file.unlink()
        return config
    answer = _ask(config, paused)
    steps = paused.step if answer.stop_now else answer.steps
    wanted = {"optimizer.learning_rate": answer.learning_rate, "steps": steps}
    try:
        changed = change_config(config, run_folder, wanted, step=paused.step)
    except ConfigError as error:
        get_run_logger().warning("stays suspended: %s", error)
        _suspend(config, run_folder, paused.step, refused=str(error))
    file.unlink()
    get_run_logger().info("resumed after step %d: learning rate %g, %d steps", paused.step, answer.learning_rate, steps)
    return changed


def pause(config: RunConfig, run_folder: Path, step: int) -> State[Any]:
    """Suspend the flow run until Resume, or end it if no worker would take it up again. Its session is closed by now.

    Returns:
        The final state of a flow run that was started by hand. Not Completed: nothing must be published.
    """
    if deployment.id is not None:
        _suspend(config, run_folder, step)
    again = "start it again to go on, with --set for what is to change"
    return Cancelled(name="Paused", message=f"{config.run_name} is paused after step {step} of {config.steps}; {again}")


def _suspend(config: RunConfig, run_folder: Path, step: int, *, refused: str = "") -> NoReturn:
    """Leave the flow and its process, until Resume."""
    paused = _Paused(flow_run_id=flow_run.id, step=step, key=uuid4().hex, refused=refused)
    write_atomic(run_folder / _PAUSED_FILE, paused.model_dump_json(indent=2) + "\n")
    _ask(config, paused)
    raise AssertionError("a new key suspends: Prefect has raised its signal")


def _ask(config: RunConfig, paused: _Paused) -> PauseForm:
    """Suspend with the form; when the flow is run again after Resume, return what was filled in."""
    text = f"**{config.run_name}** is paused after step {paused.step} of {config.steps}. Change what is to change."
    if paused.refused:
        text = f"Refused:\n\n```\n{paused.refused}\n```\n\n{text}"
    form = PauseForm.with_initial_data(
        description=text, learning_rate=config.optimizer.learning_rate, steps=config.steps
    )
    answer = suspend_flow_run(wait_for_input=form, key=paused.key)
    assert answer is not None
    return answer
