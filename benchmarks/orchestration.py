"""What Prefect costs a step: the same live session, driven in turn by tasks and by bare calls, in one flow run.

    python benchmarks/orchestration.py [--steps 300] [--output benchmarks/results/orchestration.json]

Even steps go through the tasks, artifacts included; odd steps call the session. Prints the medians and their
difference for early and late steps: it must stay flat.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL", "WARNING")

from prefect import flow

from flows.local_server import prefect_server
from relax_pipeline.build import open_session
from relax_pipeline.config import RunConfig, load_config
from relax_pipeline.session.session import TrainingSession
from tasks import training
from tasks.watching import Watch

DEMO = Path(__file__).parents[1] / "deployments" / "demo" / "demo.yaml"


def by_tasks(session: TrainingSession, step: int, watch: Watch) -> None:
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
def measure(config: RunConfig) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {"tasks": [], "calls": []}
    with open_session(config) as session:
        session.restore()
        session.sync()
        watch = Watch(session, step=0)
        for step in range(1, config.steps + 1):
            started = time.perf_counter()
            if step % 2 == 0:
                by_tasks(session, step, watch)
            else:
                by_calls(session, step)
            seconds["tasks" if step % 2 == 0 else "calls"].append(time.perf_counter() - started)
        watch.close()
    return seconds


def summarise(seconds: dict[str, list[float]]) -> list[dict[str, float | str]]:
    rows: list[dict[str, float | str]] = []
    count = len(seconds["tasks"])
    for name, part in (("early", slice(5, count // 3)), ("late", slice(2 * count // 3, count))):
        tasks, calls = (statistics.median(seconds[kind][part]) * 1000 for kind in ("tasks", "calls"))
        rows.append(
            {"steps": name, "tasks_ms": tasks, "calls_ms": calls, "added_ms": tasks - calls, "ratio": tasks / calls}
        )
    return rows


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
        print("  ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v:6}" for k, v in row.items()))


if __name__ == "__main__":
    main()
