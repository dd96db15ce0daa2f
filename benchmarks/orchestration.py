"""What Prefect costs a step: the same live session, driven in turn by tasks and by bare calls, in one flow run.

    python benchmarks/orchestration.py [--steps 300] [--output benchmarks/results/orchestration.json]

Even steps go through the tasks, artifacts included; odd steps call the session. Medians of early and of late steps:

- tasks_ms, calls_ms: a whole step.
- in_flow_ms: what an even step spent outside the session's calls.
- added_ms: an even step less the mean of its two neighbours: all that Prefect costs, the CPU that its server takes from
  trainer and engines included. Steps of one kind differ by more than that, so look at the quartiles too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL", "WARNING")

from prefect import flow

from flows.local_server import prefect_server
from relax_pipeline.build import open_session
from relax_pipeline.config import RunConfig, load_config
from relax_pipeline.session.session import TrainingSession
from tasks import training
from tasks.watching import Watch

DEMO = Path(__file__).parents[1] / "deployments" / "demo" / "demo.yaml"


class Stopwatch:
    """Stands for a session, and adds up the time of its calls."""

    def __init__(self, session: TrainingSession) -> None:
        self._session, self.seconds = session, 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._session, name)
        return partial(self._timed, found) if callable(found) else found

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            self.seconds += time.perf_counter() - started


def by_tasks(session: Any, step: int, watch: Watch) -> None:
    training.rollout(session, step)
    training.reward(session, step)
    training.train(session, step)
    training.sync(session, step)
    watch.step(step, session.finish_step(step))


def by_calls(session: TrainingSession, step: int) -> None:
    session.rollout(step)
    session.score(step)
    session.train(step)
    session.sync()
    session.finish_step(step)


@flow(name="benchmark-orchestration")
def measure(config: RunConfig) -> list[tuple[float, float]]:
    """Return the seconds of each step, whole and outside the session."""
    measured = []
    with open_session(config) as session:
        session.restore()
        session.sync()
        watch = Watch(session, step=0)
        for step in range(1, config.steps + 1):
            timed = Stopwatch(session)
            started = time.perf_counter()
            if step % 2 == 0:
                by_tasks(timed, step, watch)
            else:
                by_calls(session, step)
            seconds = time.perf_counter() - started
            measured.append((seconds, seconds - timed.seconds))
        watch.close()
    return measured


def summarise(measured: list[tuple[float, float]]) -> list[dict[str, Any]]:
    rows = []
    whole = [1000 * seconds for seconds, _ in measured]
    third = len(whole) // 3
    for name, first, last in (("early", 10, third), ("late", 2 * third, len(whole) - 1)):
        tasks = range(first | 1, last, 2)  # counted from 0: steps 2, 4, ...
        added = statistics.quantiles([whole[i] - (whole[i - 1] + whole[i + 1]) / 2 for i in tasks], n=4)
        row = {
            "tasks_ms": statistics.median(whole[i] for i in tasks),
            "calls_ms": statistics.median(whole[i + 1] for i in tasks),
            "in_flow_ms": statistics.median(1000 * measured[i][1] for i in tasks),
            "added_ms": added[1],
            "added_quartiles_ms": [added[0], added[2]],
        }
        rows.append({"steps": name, **{key: _round(value) for key, value in row.items()}})
    return rows


def _round(value: Any) -> Any:
    return [_round(part) for part in value] if isinstance(value, list) else round(value, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"steps={options.steps}", f"output_dir={folder}", "rollout.drop_zero_variance=false"]
        with prefect_server():
            rows = summarise(measure(load_config(DEMO, settings)))
    versions = {name: version(name) for name in ("prefect", "ray", "torch")}
    result = {"command": f"python benchmarks/orchestration.py --steps {options.steps}", "cpus": os.cpu_count()}
    result |= {"machine": platform.machine(), "versions": versions, "rows": rows}
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
