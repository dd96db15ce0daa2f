"""Time and memory of a merge: 8 GB in 4 shards, against `cp` of the same bytes and against peft, in the same run.

    python benchmarks/merge.py --folder /disk/with/30/GB

Each measurement is a process of its own; its peak memory is what the kernel counted for it. All three end with the
result on disk, not in the page cache: cp is followed by sync, peft's save too, our merge flushes by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from merge_models import RANK, write_adapter, write_base

OURS = """
import json, sys
from pathlib import Path
from relax_pipeline.merge.merge import merge_adapter
base, adapter, output = map(Path, sys.argv[1:])
print(json.dumps({"seconds": merge_adapter(base, adapter, output).seconds}))
"""
PEFT = """
import json, os, sys, time
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, adapter, output = sys.argv[1:]
started = time.monotonic()
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
model.save_pretrained(output, max_shard_size="2500MB")
os.sync()
print(json.dumps({"seconds": time.monotonic() - started}))
"""


def measure(command: list[str]) -> tuple[dict[str, float], str]:
    """Return what one process took, and its standard output."""
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command[0]} {command[1][:20]} failed with status {status}")
    wall = time.monotonic() - started
    cpu = usage.ru_utime + usage.ru_stime
    return {
        "seconds": wall,
        "process_seconds": wall,
        "cpu_seconds": cpu,
        "peak_gb": usage.ru_maxrss * 1024 / 1e9,
    }, output


def run_script(script: str, base: Path, adapter: Path, output: Path) -> dict[str, float]:
    measured, printed = measure([sys.executable, "-c", script, str(base), str(adapter), str(output)])
    shutil.rmtree(output)
    return {**measured, **json.loads(printed.splitlines()[-1])}


def run_copy(base: Path, output: Path) -> dict[str, float]:
    measured, _ = measure(["sh", "-c", f"cp -r '{base}' '{output}' && sync -f '{output}'"])
    shutil.rmtree(output)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="where to work; about 2.2 times the model's size")
    parser.add_argument("--layers", type=int, default=36, help="36 make 8 GB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-peft", action="store_true")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "merge.json")
    options = parser.parse_args()
    base, adapter, output = (options.folder / name for name in ("base", "adapter", "out"))
    if not base.exists():
        write_base(base, options.layers)
        write_adapter(adapter, options.layers)
    runs: dict[str, list[dict[str, float]]] = {"cp": [], "relax-pipeline": [], "peft": []}
    run_copy(base, output)  # the first copy fills the page cache for all
    for repeat in range(options.repeats):
        runs["cp"].append(run_copy(base, output))
        runs["relax-pipeline"].append(run_script(OURS, base, adapter, output))
        if repeat == 0 and not options.no_peft:  # minutes each, and far from the others
            runs["peft"].append(run_script(PEFT, base, adapter, output))
    write_results(options.results, base, runs)


def write_results(file: Path, base: Path, runs: dict[str, list[dict[str, float]]]) -> None:
    sizes = [shard.stat().st_size / 1e9 for shard in base.glob("*.safetensors")]
    copied = statistics.median(run["seconds"] for run in runs["cp"])
    table = ["| | seconds (median) | of cp | processor seconds | peak resident GB |", "|---|---|---|---|---|"]
    for name, measured in runs.items():
        if measured:
            seconds = statistics.median(run["seconds"] for run in measured)
            peak = max(run["peak_gb"] for run in measured)
            cpu = statistics.median(run["cpu_seconds"] for run in measured)
            table.append(f"| {name} | {seconds:.1f} | {seconds / copied:.2f} | {cpu:.1f} | {peak:.2f} |")
    facts = {
        "command": "python benchmarks/merge.py " + " ".join(a for a in sys.argv[1:] if not a.startswith("/")),
        "model_gb": sum(sizes),
        "largest_shard_gb": max(sizes),
        "rank": RANK,
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
        "machine": platform.machine(),
        "versions": {name: version(name) for name in ("torch", "safetensors", "peft", "transformers")},
        "runs": runs,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(facts, indent=2) + "\n")
    shards = f"{len(sizes)} shards (largest {max(sizes):.2f} GB)"
    title = f"Merge of {sum(sizes):.2f} GB in {shards}, rank {RANK}, all linear layers"
    file.with_suffix(".md").write_text(f"{title}\n\n" + "\n".join(table) + "\n")
    print("\n".join(table))


if __name__ == "__main__":
    main()
