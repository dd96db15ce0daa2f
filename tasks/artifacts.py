"""Artifacts that show the newest state of a run, kept up to date from a thread: nobody waits for the Prefect API."""

from __future__ import annotations

import json
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from tasks.alive import stay_running

_API_ERRORS = (httpx.HTTPError, PrefectException, OSError, RuntimeError)
"""RuntimeError is what the client says when the API cannot be reached."""


@dataclass(frozen=True, slots=True)
class Content:
    """What one artifact shows."""

    key: str
    kind: str
    """markdown, table or progress."""
    data: Any
    description: str


def artifact_key(run_name: str, what: str) -> str:
    """Return the key of one of a run's artifacts: Prefect takes lower-case letters, digits and '-' only."""
    return re.sub(r"[^a-z0-9-]+", "-", f"{run_name}-{what}".lower())


class LiveArtifacts:
    """One artifact a key, replaced in place, so that a long run takes no more room than a short one.

    What is overtaken before it could be sent is dropped. While the API is away artifacts fall behind, with one warning.
    """

    def __init__(self) -> None:
        self._log = get_run_logger()
        run_id = flow_run.id
        self._flow_run_id = UUID(run_id) if run_id else None
        self._ids: dict[str, UUID] = {}
        self._waiting: deque[Callable[[], Sequence[Content]]] = deque(maxlen=1)
        self._wake = threading.Event()
        self._closing = self._failing = False
        # The settings of the caller, the API's address among them, are part of the context.
        self._thread = threading.Thread(target=copy_context().run, args=(self._run,), daemon=True, name="artifacts")
        self._thread.start()

    def show(self, make: Callable[[], Sequence[Content]]) -> None:
        """Have contents made and sent, soon, in the other thread."""
        self._waiting.append(make)
        self._wake.set()

    def close(self, *, timeout: float) -> None:
        """Send what is waiting, within the time given."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        closing = False
        while not closing:
            self._wake.wait()
            self._wake.clear()
            closing = self._closing
            while self._waiting:
                self._send(self._waiting.pop()())

    def _send(self, contents: Sequence[Content]) -> None:
        try:
            with get_client(sync_client=True) as client:
                for content in contents:
                    self._replace(client, content)
                if self._flow_run_id:
                    stay_running(client, self._flow_run_id)
            self._failing = False
        except _API_ERRORS as error:
            if not self._failing:
                self._log.warning("the Prefect API takes no artifacts; training goes on without: %r", error)
            self._failing = True

    def _replace(self, client: SyncPrefectClient, content: Content) -> None:
        data = json.dumps(content.data) if content.kind == "table" else content.data
        if content.key in self._ids:
            # Not client.update_artifact: it stores the whole content a second time, in an event.
            where = {"id": self._ids[content.key]}
            client.request("PATCH", "/artifacts/{id}", path_params=where, json={"data": data})
            return
        artifact = ArtifactCreate(
            key=content.key,
            type=content.kind,
            data=data,
            description=content.description,
            flow_run_id=self._flow_run_id,
        )
        self._ids[content.key] = client.create_artifact(artifact).id
