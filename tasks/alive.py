"""A flow run that trains is Running, whatever the server was told while it was away."""

from __future__ import annotations

from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.logging import get_run_logger
from prefect.states import Running


def stay_running(client: SyncPrefectClient, flow_run_id: UUID) -> None:
    """Call this process's flow run Running again if it was taken for dead.

    After an outage that was longer than a run may be silent, zombie detection looks before the heartbeats arrive.
    """
    state = client.read_flow_run(flow_run_id).state
    if state is not None and state.is_crashed():
        get_run_logger().warning("was called Crashed (%s), and trains", state.message)
        client.set_flow_run_state(flow_run_id, Running(message="was cut off, not gone"), force=True)
