"""Events of a run, for automations and the event feed of the Prefect UI. Queued: an API that is away loses them."""

from __future__ import annotations

from typing import Any

from prefect.events import emit_event


def announce(event: str, run_name: str, payload: dict[str, Any]) -> None:
    """Emit `relax.<event>` about a run, e.g. `relax.checkpoint.committed`."""
    resource = {"prefect.resource.id": f"relax.run.{run_name}", "prefect.resource.name": run_name}
    emit_event(f"relax.{event}", resource=resource, payload=payload)
