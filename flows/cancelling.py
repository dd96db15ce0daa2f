"""What a cancelled run still does, in the seconds that its worker leaves it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prefect.exceptions import TerminationSignal
from prefect.logging import get_run_logger

if TYPE_CHECKING:
    from relax_pipeline.session.session import TrainingSession


@contextmanager
def save_if_cancelled(session: TrainingSession) -> Iterator[None]:
    """Save the last finished step when the block is cancelled, if checkpoint.save_on_cancel asks for it."""
    try:
        yield
    except TerminationSignal:
        if session.config.checkpoint.save_on_cancel and (ref := session.save_unsaved()):
            get_run_logger().info("saved step %d before the end", ref.step)
        raise
