"""Trackio: in the folder TRACKIO_DIR, or in the space TRACKIO_SPACE_ID; `trackio show` shows all runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from relax_pipeline.metrics.tracking.base import TrackedRun


class TrackioTracker:
    """One run of the project TRACKIO_PROJECT for all attempts, known by its name, which holds the run's id."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio  # noqa: PLC0415 - an extra

        self._run: Any = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "relax-pipeline"),
            name=f"{run.name}-{run.run_id[:8]}",
            resume="allow",
            config=dict(run.config),
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """See `Tracker.close`."""
        self._run.finish()
