"""Does it learn, on a real model? SmolLM2-135M on arithmetic word problems: backends and sync modes with the same seed.

    python benchmarks/learning.py --folder /tmp/learning --variants fsdp-hf-adapter megatron-sglang-adapter --kill

Each variant is one `relax-pipeline train`, a whole flow run with its Prefect server and Ray. With --kill the first one
is ended by SIGKILL half-way, and started again with the same command.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from relax_pipeline.metrics.svg import line_chart

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "deployments" / "recipes"
ADAPTER, MERGE = ("sync.mode=adapter",), ("sync.mode=merge",)
FULL = ("lora.rank=0", "sync.mode=merge", "optimizer.learning_rate=5e-6")
AHEAD = (*ADAPTER, "rollout.staleness=1")
FSDP, MEGATRON = ("trainer.kind=fsdp",), ("trainer.kind=megatron",)
HF, SGLANG = ("engine.kind=hf", "engine.batch_size=512"), ("engine.kind=sglang",)
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "fsdp-hf-adapter": FSDP + HF + ADAPTER,
    "fsdp-hf-merge": FSDP + HF + MERGE,
    "fsdp-hf-full": FSDP + HF + FULL,
    "fsdp-sglang-adapter": FSDP + SGLANG + ADAPTER,
    "fsdp-sglang-merge": FSDP + SGLANG + MERGE,
    "fsdp-sglang-full": FSDP + SGLANG + FULL,
    "megatron-hf-adapter": MEGATRON + HF + ADAPTER,
    "megatron-sglang-adapter": MEGATRON + SGLANG + ADAPTER,
    "megatron-sglang-ahead": MEGATRON + SGLANG + AHEAD,
    "megatron-sglang-merge": MEGATRON + SGLANG + MERGE,
    "megatron-sglang-full": MEGATRON + SGLANG + FULL,
}
PHASES = ("generate", "score", "train", "sync", "save", "step")


def prepare(folder: Path) -> None:
    """Make the model and the problems, where they are not there yet."""
    for script, output in (("make_smollm2.py", folder / "smollm2"), ("make_prompts.py", folder / "arithmetic")):
        if not output.exists():
            subprocess.run([sys.executable, str(RECIPES / script), str(output)], check=True)


def train(
    name: str, folder: Path, settings: Sequence[str], *, kill_after: int | None, limit: float
) -> dict[str, object]:
    """Run one variant to its end; return its rows and how it went."""
    overrides = [
        f"run_name={name}",
        f"output_dir={folder / 'runs'}",
        f"model.path={folder / 'smollm2'}",
        f"data.train.path={folder / 'arithmetic' / 'train.jsonl'}",
        f"evaluation.source.path={folder / 'arithmetic' / 'heldout.jsonl'}",
        *VARIANTS[name],
        *settings,
    ]
    command = [sys.executable, "-m", "flows.cli", "train", str(RECIPES / "smollm2-arithmetic.yaml")]
    command += [part for override in overrides for part in ("--set", override)]
    log = folder / f"{name}.log"
    started = time.monotonic()
    kills = 0
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)
        while process.poll() is None:
            time.sleep(0.5)
            rows = read_rows(folder, name)
            if kill_after and not kills and rows and rows[-1]["step"] >= kill_after:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                kills += 1
                process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)
            if time.monotonic() - started > limit:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if process.returncode:
        print(
            f"--- {name} ended with {process.returncode}\n" + "\n".join(log.read_text().splitlines()[-25:]), flush=True
        )
    return {
        "status": process.returncode,
        "kills": kills,
        "seconds": time.monotonic() - started,
        "command": [part.replace(str(folder), "FOLDER").replace(f"{ROOT}/", "") for part in command[1:]],
        "rows": read_rows(folder, name),
    }


def read_rows(folder: Path, name: str) -> list[dict[str, float]]:
    """Return the run's rows so far, the last one of each step."""
    file = folder / "runs" / name / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return list({row["step"]: row for row in map(json.loads, lines)}.values())


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


def versions() -> dict[str, str]:
    found = {}
    for package in ("torch", "transformers", "ray", "prefect", "megatron-core", "megatron-bridge", "sglang"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where to work")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=["fsdp-hf-adapter"])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--limit", type=float, default=900, help="seconds a variant may take")
    parser.add_argument("--kill", action="store_true", help="end the first variant by SIGKILL half-way, once")
    parser.add_argument("--machine", default="", help="what it ran on, for the results")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="for all variants, as for train")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    prepare(options.folder)
    runs = {}
    for index, name in enumerate(options.variants):
        shutil.rmtree(options.folder / "runs" / name, ignore_errors=True)
        kill_after = options.steps // 2 if options.kill and index == 0 else None
        settings = [f"steps={options.steps}", *options.settings]
        runs[name] = train(name, options.folder, settings, kill_after=kill_after, limit=options.limit)
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
