"""TensorBoard: event files in the run's folder; `tensorboard --logdir runs` shows all runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax_pipeline.metrics.tracking.base import TrackedRun


class TensorBoardTracker:
    """Steps that are done again replace what the files hold of them."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra

        writer: Any = SummaryWriter
        self._writer = writer(str(run.folder / "tensorboard"), purge_step=run.step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See `Tracker.close`."""
        self._writer.close()
