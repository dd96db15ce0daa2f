"""Does it learn, on a real model? SmolLM2-135M on arithmetic word problems: backends and sync modes with the same seed.

    python benchmarks/learning.py --folder /tmp/learning --variants fsdp-hf-adapter megatron-sglang-adapter --kill

Each variant is one `relax-pipeline train`, a whole flow run with its Prefect server and Ray. With --kill the first one
is ended by SIGKILL half-way, and started again with the same command; with --kill engine, one of its engines is ended.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from learning_runs import VARIANTS, Victim, prepare, train, versions

from relax_pipeline.metrics.svg import line_chart

PHASES = ("generate", "score", "train", "sync", "save", "step")


def held_out(rows: Sequence[Mapping[str, float]]) -> list[tuple[float, float]]:
    return [(row["step"], row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]


def table_row(name: str, run: Mapping[str, object]) -> str:
    rows = run["rows"]
    assert isinstance(rows, list)
    curve, trained = held_out(rows), [row for row in rows if "seconds/train" in row]
    if not trained:
        return f"| {name} | did not train |" + " |" * 10
    first, last = (f"{curve[index][1]:.2f}" if curve else "" for index in (0, -1))
    # The first steps warm up; a median keeps evaluation and saving steps out of the step's own time.
    seconds = [
        f"{statistics.median(values):.2f}"
        if (values := [r[f"seconds/{p}"] for r in trained[2:] if f"seconds/{p}" in r])
        else ""
        for p in PHASES
    ]
    differences = [row[key] for row in trained if (key := "train/rollout_logprob_abs_diff") in row] or [float("nan")]
    megabytes = statistics.median(row.get("sync/bytes", 0) for row in trained) / 1e6
    cells = [
        name,
        f"{len(trained)}",
        first,
        last,
        *seconds,
        f"{megabytes:.1f}",
        f"{statistics.mean(differences):.4f}",
        f"{run['kills']}",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where to work")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=["fsdp-hf-adapter"])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--limit", type=float, default=900, help="seconds a variant may take")
    parser.add_argument(
        "--kill",
        nargs="?",
        const="run",
        choices=get_args(Victim),
        help="end the first variant, or its engine, half-way",
    )
    parser.add_argument("--machine", default="", help="what it ran on, for the results")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="for all variants, as for train")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    prepare(options.folder)
    runs = {}
    for index, name in enumerate(options.variants):
        shutil.rmtree(options.folder / "runs" / name, ignore_errors=True)
        fault: Any = {"kill_after": options.steps // 2, "victim": options.kill} if options.kill and index == 0 else {}
        settings = [f"steps={options.steps}", *options.settings]
        runs[name] = train(name, options.folder, settings, limit=options.limit, **fault)
    write_results(options.results, options.machine, runs)


def write_results(folder: Path, machine: str, runs: Mapping[str, Mapping[str, object]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"machine": machine, "cpus": os.cpu_count(), "versions": versions(), "runs": runs}
    (folder / "learning.json").write_text(json.dumps(facts) + "\n")
    curves = {name: held_out(run["rows"]) for name, run in runs.items()}  # type: ignore[arg-type]
    chart = line_chart(curves, title="Held-out accuracy", x_label="step", y_label="accuracy")
    (folder / "learning.svg").write_text(chart)
    header = [
        "variant",
        "steps",
        "held-out first",
        "last",
        *(f"{phase} s" for phase in PHASES),
        "sync MB",
        "|Δlogprob|",
        "kills",
    ]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    lines += [table_row(name, run) for name, run in runs.items()]
    (folder / "learning.md").write_text(
        f"SmolLM2-135M-Instruct, arithmetic word problems. {machine}\n\n" + "\n".join(lines) + "\n"
    )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
