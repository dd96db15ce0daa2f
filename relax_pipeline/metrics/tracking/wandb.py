"""Weights & Biases: its environment variables say where to (WANDB_API_KEY, WANDB_PROJECT), or WANDB_MODE=offline."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from relax_pipeline.errors import TrackingError
from relax_pipeline.metrics.tracking.base import TrackedRun

_FINISH_SECONDS = 60.0


class WandbTracker:
    """One run of the service for all attempts. Files of offline runs are in wandb/ of the run's folder."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb  # noqa: PLC0415 - an extra

        curves_only = {"console": "off", "disable_git": True, "save_code": False, "x_disable_stats": True}
        settings = wandb.Settings(silent=True, finish_timeout=_FINISH_SECONDS, **curves_only)
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "relax-pipeline"),
                id=run.run_id,
                name=run.name,
                resume="allow",
                dir=run.folder,
                config=dict(run.config),
                settings=settings,
            )
        except wandb.Error as error:
            wandb.teardown()  # or it holds the run's id against the next try
            raise TrackingError(f"wandb: {error}; set WANDB_API_KEY, or WANDB_MODE=offline") from error
        # Not the service's own counter of steps, which refuses to go back where steps are done again.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        self._run.log({"step": step, **values})

    def close(self) -> None:
        """See `Tracker.close`."""
        self._run.finish()
