"""What people see of a training run in the Prefect UI. Costs the same at every step, and training nothing if lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from relax_pipeline.config import RunConfig
from relax_pipeline.metrics.curves import curves_markdown
from relax_pipeline.metrics.history import History
from relax_pipeline.metrics.log import StepLog
from relax_pipeline.metrics.report import report_markdown
from relax_pipeline.metrics.text import bytes_text
from relax_pipeline.metrics.tracking.base import TrackedRun
from relax_pipeline.metrics.tracking.trackers import Trackers
from tasks.artifacts import Content, LiveArtifacts, artifact_key

if TYPE_CHECKING:
    from relax_pipeline.session.session import TrainingSession

Row = dict[str, Any]
_SHOWN_SYNCS = 10
_SHOWN_CHECKPOINTS = 20
_SHOWN_STEPS = 5
"""Whose completions are shown."""
_CLOSE_SECONDS = 5
"""Of the 30 that a worker leaves a cancelled run."""


class Watch:
    """Progress, curves, sync health, checkpoints and completions of one training run, as artifacts and for trackers."""

    def __init__(self, session: TrainingSession, *, step: int) -> None:
        self._session, self._config, self._step = session, session.config, step
        self._history = History()
        for row in session.metrics.rows():
            self._history.add(row["step"], row)
        self._syncs: deque[Row] = deque(session.metrics.tail(_SHOWN_SYNCS), maxlen=_SHOWN_SYNCS)
        run = TrackedRun(
            run_id=session.run_id,
            name=self._config.run_name,
            folder=session.run_folder,
            step=step,
            config=self._config.model_dump(mode="json"),
        )
        self._trackers = Trackers(self._config.tracking.trackers, run)
        self._artifacts = LiveArtifacts()
        self._artifacts.show(lambda: [self._progress(step)])

    def step(self, step: int, row: dict[str, float]) -> None:
        """Take in a finished step; show it every few steps."""
        self._step = step
        self._history.add(step, row)
        self._syncs.append({"step": step, **row})
        self._trackers.log(step, row)
        if step % self._config.tracking.artifact_every == 0:
            self._show()

    def close(self) -> None:
        """Bring the curves up to date, and add the report, if the API is there."""
        self._trackers.close(timeout=_CLOSE_SECONDS)
        self._show(report_markdown(self._session.run_folder))
        self._artifacts.close(timeout=_CLOSE_SECONDS)

    def _show(self, report: str | None = None) -> None:
        """Take down what is to be shown; it is drawn and sent in the other thread."""
        step, rows, syncs = self._step, self._history.rows(), list(self._syncs)
        checkpoints = checkpoint_table(self._session)

        def contents() -> list[Content]:
            shown = [
                self._progress(step),
                self._content("curves", "markdown", curves_markdown(rows)),
                self._content("syncs", "table", sync_table(syncs, self._config)),
                self._content("checkpoints", "table", checkpoints),
                self._content("completions", "table", completion_table(self._session.samples)),
            ]
            return shown if report is None else [*shown, self._content("report", "markdown", report)]

        self._artifacts.show(contents)

    def _progress(self, step: int) -> Content:
        return self._content("progress", "progress", round(100 * step / self._config.steps, 1))

    def _content(self, what: str, kind: str, data: Any) -> Content:
        name = self._config.run_name
        return Content(artifact_key(name, what), kind, data, f"{name}: {what}")


def sync_table(syncs: Sequence[Row], config: RunConfig) -> list[Row]:
    """Return the latest syncs, newest first: what was sent, who serves it, and how it was checked."""
    return [
        {
            "step": row["step"],
            "policy version": f"{row.get('policy_version', 0):.0f}",
            "engines in service": f"{row['sync/engines']:.0f} of {config.engine.replicas}",
            "sent to each": bytes_text(row["sync/bytes"]),
            "seconds": f"{row['seconds/sync']:.2f}",
            "probe difference, worst engine": f"{row['sync/probe_difference']:.2g} nats in the mean"
            if "sync/probe_difference" in row
            else "nothing to check",
        }
        for row in reversed(syncs)
        if "sync/engines" in row
    ]


def checkpoint_table(session: TrainingSession) -> list[Row]:
    """Return the committed checkpoints, newest first."""
    return [
        {"step": ref.step, "size": bytes_text(ref.num_bytes), "path": str(ref.path)}
        for ref in reversed(session.checkpoints.committed()[-_SHOWN_CHECKPOINTS:])
    ]


def completion_table(samples: StepLog) -> list[Row]:
    """Return the newest completions, newest first."""
    newest = reversed(samples.tail(_SHOWN_STEPS))
    return [{"step": row["step"], **sample} for row in newest for sample in row["samples"]]
