"""All trackers of a run, each in a thread of its own: a service that is slow or away costs curves, never training."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from importlib.util import find_spec
from queue import SimpleQueue

from relax_pipeline.errors import ConfigError, TrackingError
from relax_pipeline.metrics.tracking.base import TrackedRun, Tracker
from relax_pipeline.metrics.tracking.mlflow import MlflowTracker
from relax_pipeline.metrics.tracking.tensorboard import TensorBoardTracker
from relax_pipeline.metrics.tracking.trackio import TrackioTracker
from relax_pipeline.metrics.tracking.wandb import WandbTracker

logger = logging.getLogger(__name__)

_MAKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
}
"""By the name of the setting, of the extra, and of the package."""


def check_installed(names: Sequence[str]) -> None:
    """Refuse trackers that cannot work, before anything has started.

    Raises:
        ConfigError: A tracker's package is not installed.
    """
    if missing := [name for name in names if find_spec(name) is None]:
        raise ConfigError(
            f"tracking.trackers: {', '.join(missing)} not installed; "
            f"pip install 'relax-pipeline[{','.join(missing)}]', or take it out"
        )


class Trackers:
    """Hands the rows of a run to the services it names."""

    def __init__(self, names: Sequence[str], run: TrackedRun) -> None:
        self._followers = [_Follower(name, run) for name in names]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take in a finished step; nobody waits."""
        for follower in self._followers:
            follower.rows.put((step, values))

    def close(self, *, timeout: float) -> None:
        """Send what is waiting, within the time given."""
        deadline = time.monotonic() + timeout
        for follower in self._followers:
            follower.rows.put(None)
        for follower in self._followers:
            follower.thread.join(max(0.0, deadline - time.monotonic()))
            if follower.thread.is_alive():
                logger.warning("%s did not take all curves in time; metrics.jsonl has them", follower.name)


class _Follower:
    """One tracker and its thread."""

    def __init__(self, name: str, run: TrackedRun) -> None:
        self.name, self._run_info = name, run
        self.rows: SimpleQueue[tuple[int, Mapping[str, float]] | None] = SimpleQueue()
        self._failing = False
        # The context tells the log whose messages these are.
        self.thread = threading.Thread(target=copy_context().run, args=(self._run,), daemon=True, name=name)
        self.thread.start()

    def _run(self) -> None:
        tracker: Tracker | None = None
        while row := self.rows.get():
            try:
                tracker = tracker or _MAKERS[self.name](self._run_info)
                tracker.log(*row)
                self._failing = False
            except TrackingError as error:
                self._warn(error)
        try:
            if tracker:
                tracker.close()
        except TrackingError as error:
            self._warn(error)

    def _warn(self, error: TrackingError) -> None:
        """Say so once an outage."""
        if not self._failing:
            logger.warning("curves are lost meanwhile, metrics.jsonl has them: %s", error)
        self._failing = True
