"""A crashed run is scheduled again, and not for ever: on a real Prefect server."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.events import emit_event
from prefect.events.worker import EventsWorker
from prefect.states import Completed, Crashed, Running

from flows.recover import recover

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.prefect


def crashed_run(crashes: int) -> UUID:
    """A flow run of some deployment that has crashed so many times."""
    with get_client(sync_client=True) as client:
        flow_id = client.create_flow_from_name("some-flow")
        deployment_id = client.create_deployment(flow_id, name=f"some-{uuid.uuid4().hex}")
        run_id = client.create_flow_run_from_deployment(deployment_id).id
        for _ in range(crashes):
            client.set_flow_run_state(run_id, Running(), force=True)
            client.set_flow_run_state(run_id, Crashed(), force=True)
    return run_id


def heartbeat(run_id: UUID) -> None:
    """What the process of a training run sends every 30 s."""
    resource = {"prefect.resource.id": f"prefect.flow-run.{run_id}"}
    with get_client(sync_client=True) as client:
        flow_id = client.create_flow_from_name("relax-train")
    flow = {
        "prefect.resource.id": f"prefect.flow.{flow_id}",
        "prefect.resource.name": "relax-train",
        "prefect.resource.role": "flow",
    }
    emit_event("prefect.flow-run.heartbeat", resource=resource, related=[flow])
    EventsWorker.drain_all(timeout=10)


def state_name(run_id: UUID) -> str | None:
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(run_id).state
    return state.name if state else None


def test_a_crashed_run_is_scheduled_again(prefect_api: str) -> None:
    run_id = crashed_run(2)
    assert recover(run_id, max_crashes=2)
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(run_id)
    assert run.state is not None
    assert run.state.name == "AwaitingRetry"
    assert run.empirical_policy.retry_type == "reschedule"


def test_a_run_that_crashed_too_often_stays_down(prefect_api: str) -> None:
    run_id = crashed_run(3)
    assert not recover(run_id, max_crashes=2)
    assert state_name(run_id) == "Crashed"


def test_a_run_that_was_mended_meanwhile_is_left_alone(prefect_api: str) -> None:
    run_id = crashed_run(1)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run_id, Completed(), force=True)
    assert not recover(run_id)
    assert state_name(run_id) == "Completed"


@pytest.fixture
def zombie_detection(prefect_api: str) -> Iterator[None]:
    """After the shortest silence that Prefect allows; gone after the test, for the sake of the runs of others."""
    subprocess.run([sys.executable, "deployments/prepare_server.py", "--silence", "10"], cwd=REPOSITORY, check=True)
    yield
    Automation.read(name="relax-zombies").delete()


@pytest.mark.usefixtures("zombie_detection")
def test_a_run_that_falls_silent_is_crashed_and_scheduled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.recover._HEARTBEAT_SECONDS", 3.0)
    run_id = crashed_run(0)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run_id, Running(), force=True)
    time.sleep(3.0)  # the server looks for new automations
    heartbeat(run_id)
    deadline = time.monotonic() + 60
    while state_name(run_id) == "Running" and time.monotonic() < deadline:
        time.sleep(0.5)
    assert state_name(run_id) == "Crashed"
    assert recover(run_id)
    assert state_name(run_id) == "AwaitingRetry"


def test_a_run_that_was_only_cut_off_is_not_started_twice(prefect_api: str) -> None:
    run_id = crashed_run(0)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run_id, Running(), force=True)
        client.set_flow_run_state(run_id, Crashed(message="no heartbeat for 150 s"), force=True)
    heartbeat(run_id)
    assert not recover(run_id)
    assert state_name(run_id) == "Running"
