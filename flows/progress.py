"""How far a run is: a bar on a terminal, a line a step in the logs and the UI."""

from __future__ import annotations

import sys
from collections import deque
from types import TracebackType

from prefect.logging import get_run_logger
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from relax_pipeline.config import RunConfig
from relax_pipeline.metrics.text import seconds_text

_RECENT_STEPS = 20


class StepProgress:
    """Shows finished steps. The bar appears only where standard error is a terminal."""

    def __init__(self, config: RunConfig, *, step: int) -> None:
        self._config = config
        self._log = get_run_logger()
        self._seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        columns = (TextColumn(config.run_name), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
        self._task = self._bar.add_task("starting", total=config.steps, completed=step)

    def __enter__(self) -> StepProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def finish(self, step: int, row: dict[str, float]) -> None:
        """Show one finished step."""
        self._seconds.append(row["seconds/step"])
        left = sum(self._seconds) / len(self._seconds) * (self._config.steps - step)
        text = f"{describe_row(row)}, {seconds_text(left)} left"
        self._log.info(f"step {step}/{self._config.steps}: {text}")
        self._bar.update(self._task, completed=step, description=text)


def describe_row(row: dict[str, float]) -> str:
    """Return what a person wants to know of a step: reward, held-out figure if measured, speed, sync."""
    parts = [f"reward {row['reward/mean']:.3f}"]
    if "eval/reward" in row:
        parts.append(f"held-out {row.get('eval/accuracy', row['eval/reward']):.3f}")
    parts.append(f"{row['rollout/tokens_per_second']:,.0f} tokens/s")
    parts.append(f"sync {row['seconds/sync']:.2f} s")
    return ", ".join(parts)
