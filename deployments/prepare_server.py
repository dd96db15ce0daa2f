"""Prepare a Prefect server for deployments/prefect.yaml: work pools with limits, and zombie detection. Idempotent.

python deployments/prepare_server.py [--silence 150]
"""

from __future__ import annotations

import argparse
from datetime import timedelta

from prefect.automations import Automation
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound

POOLS: dict[str, int | None] = {"relax-train": 1, "relax-cpu": None}
"""Flow runs at a time. One training: raise it only if the workers of the pool do not share GPUs."""


def main() -> None:
    """Create what is missing, and bring the rest to what is written here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    help_text = "seconds without a heartbeat after which a run is Crashed; prefect.yaml asks for one every 30 s"
    parser.add_argument("--silence", type=int, default=150, help=help_text)
    silence = timedelta(seconds=parser.parse_args().silence)
    with get_client(sync_client=True) as client:
        for name, limit in POOLS.items():
            prepare_pool(client, name, limit)
    prepare_zombie_detection(silence)


def prepare_pool(client: SyncPrefectClient, name: str, limit: int | None) -> None:
    """Create a process work pool, or set its limit."""
    try:
        client.read_work_pool(name)
        client.update_work_pool(name, WorkPoolUpdate(concurrency_limit=limit))
    except ObjectNotFound:
        client.create_work_pool(WorkPoolCreate(name=name, type="process", concurrency_limit=limit))
    print(f"work pool {name}: {'no limit' if limit is None else f'{limit} at a time'}")


def prepare_zombie_detection(silence: timedelta) -> None:
    """Have the server call a training run Crashed when its heartbeats stop: a machine that is gone reports nothing."""
    wanted = Automation(
        name="relax-zombies",
        description="A training run without heartbeats is Crashed; relax-recover then schedules it again.",
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.*"},
            match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
            match_related=ResourceSpecification(
                {"prefect.resource.name": "relax-train", "prefect.resource.role": "flow"}
            ),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=silence,
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message=f"no heartbeat for {silence.seconds} s")],
    )
    try:
        found = Automation.read(name=wanted.name)
    except ValueError:
        wanted.create()
    else:
        wanted.id = found.id
        wanted.update()
    print(f"automation {wanted.name}: Crashed after {silence.seconds} s of silence")


if __name__ == "__main__":
    main()
