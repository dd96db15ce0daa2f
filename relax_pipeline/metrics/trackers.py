"""Where a run's curves go besides metrics.jsonl, which is always written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from relax_pipeline.errors import ConfigError


class Tracker(Protocol):
    """Takes the rows of a run. An attempt that resumes continues the curves of the one before it."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take in a finished step."""
        ...

    def close(self) -> None:
        """Write what is buffered."""
        ...


def open_trackers(names: Sequence[str], run_folder: Path, *, step: int) -> list[Tracker]:
    """Open the trackers of a run that goes on after a step; what they hold of later steps is superseded.

    Raises:
        ConfigError: A tracker's package is not installed.
    """
    makers = {"tensorboard": TensorBoardTracker}
    return [makers[name](run_folder / name, step=step) for name in names]


class TensorBoardTracker:
    """Event files in the run's folder: `tensorboard --logdir runs` shows all runs."""

    def __init__(self, folder: Path, *, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise ConfigError(
                "tracking.trackers: 'tensorboard' needs its package; install relax-pipeline[tensorboard]"
            ) from error
        writer: Any = SummaryWriter
        self._writer = writer(str(folder), purge_step=step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See `Tracker.close`."""
        self._writer.close()
