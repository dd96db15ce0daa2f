"""Curves go on where an attempt left off, in each service as its own package shows them; none holds a run up."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relax_pipeline.config import check_config
from relax_pipeline.errors import ConfigError
from relax_pipeline.metrics.tracking.base import TrackedRun
from relax_pipeline.metrics.tracking.trackers import Trackers, check_installed

Curve = list[tuple[int, float]]
DONE_AGAIN = [(1, 0.5), (2, 1.0), (3, 1.5), (3, 1.5), (4, 2.0)]


def run_after(step: int, folder: Path) -> TrackedRun:
    return TrackedRun(run_id="4f2a" * 8, name="demo", folder=folder / "demo", step=step, config={"lora": {"rank": 8}})


def track(name: str, folder: Path, *, after: int, steps: list[int]) -> None:
    """One attempt at the run."""
    (folder / "demo").mkdir(exist_ok=True)
    trackers = Trackers([name], run_after(after, folder))
    for step in steps:
        trackers.log(step, {"reward/mean": step / 2})
    trackers.close(timeout=60)


def tensorboard_curve(folder: Path) -> Curve:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "demo" / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("reward/mean")]


def wandb_curve(folder: Path) -> Curve:
    """What `wandb sync` would send, of all offline runs that bear the run's id."""
    from wandb.proto.wandb_internal_pb2 import Record

    points = []
    for file in sorted(folder.glob(f"demo/wandb/offline-run-*/run-{'4f2a' * 8}.wandb")):
        for data in leveldb_records(file.read_bytes()):
            items = {item.key or item.nested_key[0]: item.value_json for item in Record.FromString(data).history.item}
            if items:
                points.append((int(items["step"]), float(items["reward/mean"])))
    return points


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log of one block: 7 bytes of wandb, then checksum (4), length (2), type (1), data."""
    position = 7
    while position + 7 <= len(data):
        length = int.from_bytes(data[position + 4 : position + 6], "little")
        yield data[position + 7 : position + 7 + length]
        position += 7 + length


def mlflow_curve(folder: Path) -> Curve:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("relax-pipeline").experiment_id])
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "reward/mean")]


def trackio_curve(folder: Path) -> Curve:
    with sqlite3.connect(folder / "trackio" / "relax-pipeline.db") as database:
        rows = database.execute(
            "select step, json_extract(metrics, '$.\"reward/mean\"') from metrics where run_name = 'demo-4f2a4f2a'"
        ).fetchall()
    database.close()
    return rows


@pytest.fixture
def local_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "TRACKIO_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("local_services")
@pytest.mark.parametrize(
    ("name", "curve", "expected"),
    [
        ("tensorboard", tensorboard_curve, [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)]),
        ("wandb", wandb_curve, DONE_AGAIN),
        ("mlflow", mlflow_curve, DONE_AGAIN),
        ("trackio", trackio_curve, DONE_AGAIN),
    ],
)
def test_an_attempt_that_resumes_continues_the_curves(
    name: str, curve: Callable[[Path], Curve], expected: Curve, tmp_path: Path
) -> None:
    track(name, tmp_path, after=0, steps=[1, 2, 3])
    time.sleep(1.0)  # wandb names the files of offline runs by the second
    track(name, tmp_path, after=2, steps=[3, 4])
    deadline = time.monotonic() + 20  # wandb's own process writes the last lines in its own time
    while curve(tmp_path) != expected and time.monotonic() < deadline:
        time.sleep(0.2)
    assert curve(tmp_path) == expected


def test_a_service_without_its_package_is_refused_with_the_way_to_install_it() -> None:
    check_installed(["tensorboard", "wandb"])
    with pytest.raises(ConfigError, match=r"absent not installed; pip install 'relax-pipeline\[absent\]'"):
        check_installed(["tensorboard", "absent"])


def test_a_service_nothing_sends_to_is_refused() -> None:
    values = {"run_name": "r", "steps": 1, "model": {"path": "m"}, "data": {"train": {"path": "p"}}}
    values |= {"sync": {"mode": "adapter"}, "tracking": {"trackers": ["comet"]}}
    with pytest.raises(
        ConfigError, match=r"tracking\.trackers\.0: input should be 'tensorboard', 'wandb', 'mlflow' or"
    ):
        check_config(values, source="test")


def test_a_service_that_is_away_costs_its_curves_and_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with caplog.at_level(logging.WARNING, logger="relax_pipeline"):
        trackers = Trackers(["mlflow"], run_after(0, tmp_path))
        started = time.monotonic()
        for step in range(1, 4):
            trackers.log(step, {"reward/mean": 0.5})
        assert time.monotonic() - started < 0.1
        trackers.close(timeout=60)
    (warning,) = [record.message for record in caplog.records if record.name.startswith("relax_pipeline")]
    assert warning.startswith("curves are lost meanwhile, metrics.jsonl has them: mlflow at http://127.0.0.1:9: ")
