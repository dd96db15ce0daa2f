"""What people see in the Prefect UI. Losing it must never cost training: every call is best effort."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar, cast
from uuid import UUID

import httpx
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger

from relax_pipeline.config import RunConfig
from relax_pipeline.metrics.curves import curves_markdown
from relax_pipeline.metrics.log import StepLog
from relax_pipeline.session.session import TrainingSession

T = TypeVar("T")


class Watch:
    """Progress, curves, checkpoints and sample completions of one training run, as artifacts."""

    def __init__(self, config: RunConfig, *, step: int) -> None:
        self._config = config
        self._key = re.sub(r"[^a-z0-9-]+", "-", config.run_name.lower()).strip("-")
        self._progress = self._try(
            lambda: cast(
                UUID,  # a coroutine only where the caller is one
                create_progress_artifact(self._percent(step), f"{self._key}-progress", f"{config.steps} steps"),
            )
        )

    def step(self, session: TrainingSession, step: int) -> None:
        """Show a finished step; curves and tables every few steps and at the end."""
        if step % self._config.tracking.artifact_every and step != self._config.steps:
            return
        progress = self._progress
        if progress is not None:
            self._try(lambda: update_progress_artifact(progress, progress=self._percent(step)))
        rows = session.metrics.rows()
        self._try(lambda: create_markdown_artifact(curves_markdown(rows), key=f"{self._key}-curves"))
        self._try(lambda: create_table_artifact(_checkpoints(session), key=f"{self._key}-checkpoints"))
        self._try(lambda: create_table_artifact(_completions(session.samples), key=f"{self._key}-completions"))

    def _percent(self, step: int) -> float:
        return round(100 * step / self._config.steps, 1)

    def _try(self, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except (httpx.HTTPError, PrefectException, OSError) as error:
            get_run_logger().warning("the Prefect API did not take an artifact; training goes on: %r", error)
            return None


def _checkpoints(session: TrainingSession) -> list[dict[str, Any]]:
    return [
        {"step": ref.step, "MiB": round(ref.num_bytes / 2**20, 2), "path": str(ref.path)}
        for ref in reversed(session.checkpoints.committed())
    ]


def _completions(samples: StepLog) -> list[dict[str, Any]]:
    """Return the newest completions first."""
    return [{"step": row["step"], **sample} for row in reversed(samples.rows()[-5:]) for sample in row["samples"]]
