"""Artifacts on a real Prefect server: replaced in place, and nothing to wait for while the server is away."""

from __future__ import annotations

import time
from typing import Any
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Crashed

from tasks.artifacts import Content, LiveArtifacts
from tests.integration.fault_proxy import FaultProxy

pytestmark = pytest.mark.prefect


def artifacts(key: str) -> list[Any]:
    with get_client(sync_client=True) as client:
        return client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])))


def test_a_key_is_one_artifact_with_the_newest_content(prefect_api: str) -> None:
    @flow
    def run() -> None:
        live = LiveArtifacts()
        for step in range(3):
            live.show(lambda: [Content("once", "table", [{"step": step}], "a table")])  # noqa: B023
            time.sleep(0.3)
        live.close(timeout=30)

    run()
    (artifact,) = artifacts("once")
    assert artifact.data == '[{"step": 2}]'
    assert artifact.flow_run_id is not None


def test_a_run_that_was_taken_for_dead_says_that_it_lives(prefect_api: str) -> None:
    names: list[str] = []

    @flow
    def run() -> None:
        live = LiveArtifacts()
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(UUID(flow_run.id), Crashed(message="no heartbeat for 150 s"), force=True)
            live.show(lambda: [Content("alive", "progress", 1.0, "")])
            live.close(timeout=30)
            names.append(client.read_flow_run(UUID(flow_run.id)).state_name or "")

    run()
    assert names == ["Running"]


def test_nobody_waits_for_an_api_that_takes_no_artifacts(prefect_api: str) -> None:
    seconds: list[float] = []

    @flow
    def run() -> None:
        live = LiveArtifacts()
        started = time.monotonic()
        for step in range(100):
            live.show(lambda: [Content("away", "progress", float(step), "")])  # noqa: B023
        seconds.append(time.monotonic() - started)
        live.close(timeout=0.5)
        seconds.append(time.monotonic() - started)

    with FaultProxy(prefect_api.removesuffix("/api")).running() as proxy:
        proxy.fault = lambda call: "reset" if "artifacts" in call.path else None
        with temporary_settings({PREFECT_API_URL: f"{proxy.url}/api"}):
            run()
    shown, closed = seconds
    assert any("artifacts" in call.path for call in proxy.calls)
    assert shown < 0.1
    assert closed < 2
    assert artifacts("away") == []
