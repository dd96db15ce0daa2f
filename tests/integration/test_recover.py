"""A crashed run is scheduled again, and not for ever: on a real Prefect server."""

from __future__ import annotations

import uuid
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.states import Completed, Crashed, Running

from flows.recover import recover

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
