"""Deployed, scheduled, triggered, killed in every place and cancelled: on a real server, workers and object store."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relax_pipeline.checkpoint.seal import verify
from relax_pipeline.checkpoint.store import CheckpointStore
from relax_pipeline.metrics.log import StepLog, series
from relax_pipeline.publish.published import verify_published
from tests.integration.prefect_platform import Platform, processes_of, read_processes, wait_for

pytestmark = [pytest.mark.prefect, pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS = 100
OUTAGE_SECONDS = 70
"""Longer than a call of the API tries again by itself, and than zombie detection waits here."""


@pytest.fixture(scope="module")
def platform(s3_endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    platform = Platform(tmp_path_factory.mktemp("platform"))
    try:
        platform.start()
        yield platform
    finally:
        platform.stop()


def last_step(run: Path) -> int:
    rows = StepLog(run / "metrics.jsonl").tail(1)
    return int(rows[0]["step"]) if rows else -1


def shown_step(platform: Platform, run_name: str) -> int:
    """The step of the newest sync that the UI shows."""
    table = platform.artifact(f"{run_name}-syncs")
    return int(json.loads(table)[0]["step"]) if table else -1


def wait_for_step(platform: Platform, run: Path, step: int, *, attempts: int) -> None:
    """Wait until an attempt is under way, the given one or a later one, and has done a step."""

    def done() -> bool:
        begun = len(StepLog(run / "attempts.jsonl").rows())
        return begun >= attempts and last_step(run) >= step

    wait_for(done, f"step {step} of attempt {attempts}", seconds=300, log=platform.log)


def final_adapter(run: Path) -> bytes:
    newest = CheckpointStore(run / "checkpoints").committed()[-1]
    assert newest.step == STEPS
    return (newest.path / "adapter" / "adapter_model.safetensors").read_bytes()


def test_a_scheduled_run_that_is_cancelled_leaves_no_process_and_an_intact_checkpoint(
    platform: Platform, run_values: dict[str, Any]
) -> None:
    run = Path(run_values["output_dir"]) / "cancelled"
    values = run_values | {"run_name": "cancelled", "steps": 100_000, "checkpoint": {"every": 3}}
    platform.schedule("relax-train/train", after=20, config=values)
    wait_for_step(platform, run, 5, attempts=1)
    flow_run_id = platform.named("train-cancelled")
    assert len(processes_of(flow_run_id)) > 3
    started = time.monotonic()
    platform.command("prefect", "flow-run", "cancel", str(flow_run_id))
    platform.wait_until(flow_run_id, "Cancelled", seconds=60)
    assert processes_of(flow_run_id) == []
    print(f"cancelled after {time.monotonic() - started:.1f} s")
    verify(CheckpointStore(run / "checkpoints").committed()[-1].path)


def test_a_run_outlives_its_server_pauses_and_goes_on_with_what_its_form_says(
    platform: Platform, run_values: dict[str, Any]
) -> None:
    run = Path(run_values["output_dir"]) / "paused"
    values = run_values | {"run_name": "paused", "steps": 100_000, "evaluation": None, "checkpoint": {"every": 1000}}
    # Steps of half a second: the server takes in afterwards what it missed.
    values["rewards"] = {"scorers": [{"kind": "python:hosted.leisurely"}], "workers": 1}
    values["rollout"] = run_values["rollout"] | {"drop_zero_variance": False}
    flow_run_id = platform.train(values)
    wait_for_step(platform, run, 2, attempts=1)

    platform.kill("server")
    step = last_step(run)
    time.sleep(OUTAGE_SECONDS)
    assert last_step(run) > step + 5
    platform.start_server()
    step = last_step(run)
    wait_for(lambda: shown_step(platform, "paused") > step, "artifacts", seconds=120, log=platform.log)

    platform.run("relax-pause/pause", run_name="paused", output_dir=str(run.parent))
    platform.wait_until(flow_run_id, "Suspended", seconds=120)
    wait_for(lambda: processes_of(flow_run_id) == [], "its processes to end", seconds=30)
    step = last_step(run)
    assert [ref.step for ref in CheckpointStore(run / "checkpoints").committed()] == [step]

    platform.resume(flow_run_id, {"learning_rate": 0})
    wait_for(lambda: "Refused" in platform.form_text(flow_run_id), "the form again", seconds=120, log=platform.log)
    assert "optimizer.learning_rate: input should be greater than 0, got 0" in platform.form_text(flow_run_id)
    platform.wait_until(flow_run_id, "Suspended", seconds=30)

    platform.resume(flow_run_id, {"learning_rate": 0.002, "steps": step + 3})
    platform.wait_until(flow_run_id, "Completed", seconds=300)
    assert last_step(run) == step + 3
    rates = series(StepLog(run / "metrics.jsonl").rows(), "train/learning_rate")
    assert {(done > step, rate) for done, rate in rates} == {(False, 0.01), (True, 0.002)}
    assert StepLog(run / "attempts.jsonl").rows()[-1]["changes"] == {
        "optimizer.learning_rate": {"given": 0.01, "chosen": 0.002},
        "steps": {"given": 100_000, "chosen": step + 3},
    }


def test_from_a_deployment_to_a_verified_model_and_through_every_kill(
    platform: Platform, run_values: dict[str, Any], bucket: str, s3_endpoint: str
) -> None:
    """One test, because the killed run is compared with the one that was published."""
    runs = Path(run_values["output_dir"])
    values = run_values | {"steps": STEPS, "evaluation": None, "checkpoint": {"every": 5}}

    store = {"store": f"s3://{bucket}/checkpoints", "endpoint_url": s3_endpoint, "remote_keep_last": 2}
    publish = {"enabled": True, "destination": f"s3://{bucket}/models", "endpoint_url": s3_endpoint}
    whole = values | {"run_name": "whole", "checkpoint": values["checkpoint"] | store, "publish": publish}
    platform.train(whole)
    wait_for((runs / "whole" / "PUBLISHED.json").is_file, "the model", seconds=300, log=platform.log)
    published = json.loads((runs / "whole" / "PUBLISHED.json").read_text())
    assert verify_published(published["uri"], endpoint_url=s3_endpoint).step == STEPS

    flow_run_id = platform.train(values | {"run_name": "killed"})
    kill_everything_in_turn(platform, runs / "killed")
    platform.wait_until(flow_run_id, "Completed", seconds=300)
    assert final_adapter(runs / "killed") == final_adapter(runs / "whole")


def kill_everything_in_turn(platform: Platform, run: Path) -> None:
    wait_for_step(platform, run, 3, attempts=1)
    os.kill(read_processes(run)["trainer"][0], signal.SIGKILL)  # the flow tries again by itself
    wait_for_step(platform, run, 8, attempts=2)
    os.kill(read_processes(run)["engines"][0], signal.SIGKILL)  # the pool replaces it
    wait_for_step(platform, run, 12, attempts=2)
    os.kill(read_processes(run)["flow"], signal.SIGKILL)  # the worker reports it, `recover` schedules it again
    wait_for_step(platform, run, 16, attempts=3)
    platform.kill("relax-train")  # its flow run dies with it, and is scheduled again for the next worker
    platform.start_worker("relax-train")
    wait_for_step(platform, run, 20, attempts=4)
    platform.kill("server")  # training goes on without
    platform.start_server()
