from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from relax_pipeline.config import TrackingConfig
from relax_pipeline.metrics.trackers import Tracker, open_trackers


def open_tensorboard(run_folder: Path, *, step: int) -> Tracker:
    (tracker,) = open_trackers(["tensorboard"], run_folder, step=step)
    return tracker


def curve(run_folder: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(run_folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_a_resumed_run_continues_its_curves_and_replaces_what_it_does_again(tmp_path: Path) -> None:
    tracker = open_tensorboard(tmp_path, step=0)
    for step in (1, 2, 3):
        tracker.log(step, {"reward/mean": step / 2})
    tracker.close()
    tracker = open_tensorboard(tmp_path, step=2)
    for step in (3, 4):
        tracker.log(step, {"reward/mean": -1.0})
    tracker.close()
    assert curve(tmp_path, "reward/mean") == [(1, 0.5), (2, 1.0), (3, -1.0), (4, -1.0)]


def test_a_service_nothing_sends_to_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"wandb: not available; use tensorboard"):
        TrackingConfig(trackers=("wandb",))
