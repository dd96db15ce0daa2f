"""The way back for a training run whose process is gone: schedule it again, a bounded number of times."""

from __future__ import annotations

import time
from typing import Any
from uuid import UUID

from prefect import State, flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import OrchestrationResult, SetStateStatus
from prefect.events.filters import EventFilter, EventNameFilter, EventOccurredFilter, EventResourceFilter
from prefect.logging import get_run_logger
from prefect.states import AwaitingRetry

from tasks.alive import stay_running

_HEARTBEAT_SECONDS = 45.0
"""prefect.yaml asks for a heartbeat every 30 s."""


@flow(name="relax-recover", flow_run_name="recover-{flow_run_id}", persist_result=False)
def recover(flow_run_id: UUID, *, max_crashes: int = 5) -> bool:
    """Schedule a crashed flow run again, unless it lives or has crashed too often; return whether it was scheduled.

    The run goes on at its newest checkpoint. Flow retries cannot do this: they need the process that is gone. A run
    whose heartbeats only did not arrive, because the server was away, is called Running again.

    Args:
        flow_run_id: Of the crashed run.
        max_crashes: After so many a person has to look.
    """
    log = get_run_logger()
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(flow_run_id)
        crashes = sum(state.is_crashed() for state in client.read_flow_run_states(flow_run_id))
        if run.state is None or not run.state.is_crashed():
            log.info("%s is no longer crashed: nothing to do", run.name)
            return False
        if run.deployment_id is None:
            log.warning("%s was started by hand, not by a deployment: start it again by hand", run.name)
            return False
        if "no heartbeat" in (run.state.message or "") and is_alive(client, run, seconds=_HEARTBEAT_SECONDS):
            log.warning("%s goes on: only its heartbeats did not arrive", run.name)
            stay_running(client, flow_run_id)
            return False
        if crashes > max_crashes:
            log.error("%s has crashed %d times and stays down; see its log, then press Retry", run.name, crashes)
            return False
        # Not by force: that leaves the run marked as one whose own process tries again, and workers pass it over.
        again: State[None] = AwaitingRetry(message=f"crash {crashes} of {max_crashes}")
        answer: OrchestrationResult[Any] = client.set_flow_run_state(flow_run_id, again)
    scheduled = answer.status == SetStateStatus.ACCEPT
    log.info("%s, crash %d of %d: %s", run.name, crashes, max_crashes, "scheduled again" if scheduled else answer)
    return scheduled


def is_alive(client: SyncPrefectClient, run: FlowRun, *, seconds: float) -> bool:
    """Return whether a flow run that is called crashed sends a heartbeat, waiting for one for so long."""
    assert run.state is not None
    heartbeats = EventFilter(
        occurred=EventOccurredFilter(since=run.state.timestamp),
        event=EventNameFilter(name=["prefect.flow-run.heartbeat"]),
        resource=EventResourceFilter(id=[f"prefect.flow-run.{run.id}"]),
    )
    deadline = time.monotonic() + seconds
    while not (found := client.read_events(heartbeats, limit=1).events) and time.monotonic() < deadline:
        time.sleep(1.0)
    return bool(found)
