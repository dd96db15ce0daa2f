"""What a service that draws curves has to do, and what it is told of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run whose curves are drawn."""

    run_id: str
    """Stays the same for all attempts, on all machines: it is kept in the checkpoints."""
    name: str
    folder: Path
    step: int
    """Steps done. What a service holds of later ones is done again, with the same numbers."""
    config: Mapping[str, Any]


class Tracker(Protocol):
    """Takes the rows of a run. An attempt that resumes continues the curves of the one before it."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take in a finished step.

        Raises:
            TrackingError: The service did not take it.
        """
        ...

    def close(self) -> None:
        """Send what is buffered.

        Raises:
            TrackingError: The service did not take it.
        """
        ...
