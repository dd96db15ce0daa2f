"""The way back for a training run whose process is gone: schedule it again, a bounded number of times."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from prefect import State, flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.responses import OrchestrationResult, SetStateStatus
from prefect.logging import get_run_logger
from prefect.states import AwaitingRetry


@flow(name="relax-recover", flow_run_name="recover-{flow_run_id}", persist_result=False)
def recover(flow_run_id: UUID, *, max_crashes: int = 5) -> bool:
    """Schedule a crashed flow run again, unless it has crashed too often; return whether it was scheduled.

    The run goes on at its newest checkpoint. Flow retries cannot do this: they need the process that is gone.

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
        if crashes > max_crashes:
            log.error("%s has crashed %d times and stays down; see its log, then press Retry", run.name, crashes)
            return False
        # Not by force: that leaves the run marked as one whose own process tries again, and workers pass it over.
        again: State[None] = AwaitingRetry(message=f"crash {crashes} of {max_crashes}")
        answer: OrchestrationResult[Any] = client.set_flow_run_state(flow_run_id, again)
    scheduled = answer.status == SetStateStatus.ACCEPT
    log.info("%s, crash %d of %d: %s", run.name, crashes, max_crashes, "scheduled again" if scheduled else answer)
    return scheduled
