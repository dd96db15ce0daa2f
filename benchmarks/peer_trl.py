"""The same reinforcement learning by TRL's GRPOTrainer, beside ours on the same GPU: seconds a step and peak memory.

    pip install --no-deps trl==1.16.0 datasets
    pip install --target /tmp/vllm vllm==0.26.0    # the last for torch 2.11; its openai is newer than SGLang's
    python benchmarks/peer_trl.py --folder /tmp/learning --trl-path /tmp/vllm

SmolLM2-135M, LoRA on all linear layers, one optimizer step a batch, the same prompts, rewards, lengths, learning rate.
TRL generates with transformers, with continuous batching, and with vLLM in the process and on the GPU that train.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import learning_runs
import trl_runs

WARM_UP = 3
"""Steps at the start that are not counted."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where to work")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--limit", type=float, default=300, help="seconds a run may take")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--trl", nargs="*", choices=tuple(trl_runs.TRL), default=tuple(trl_runs.TRL), help="how TRL generates"
    )
    parser.add_argument("--trl-path", nargs="*", default=[], help="folders of packages for TRL's processes alone")
    parser.add_argument("--variant", choices=tuple(learning_runs.VARIANTS), default="megatron-sglang-adapter")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="for our run, as for train")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    learning_runs.prepare(options.folder)
    runs: dict[str, dict[str, Any]] = {}
    for variant in options.trl:
        figures = runs[f"TRL, {variant}"] = {}
        with learning_runs.peak_memory(figures):
            run = (options.folder, options.steps, variant, options.device)
            figures |= trl_runs.in_own_process(options.limit, options.trl_path, *run)
        write(options, runs)
    ours = runs[f"relax-pipeline, {options.variant}"] = {}
    settings = [f"steps={options.steps}", "checkpoint.every=1000", "evaluation.every=1000", *options.settings]
    with learning_runs.peak_memory(ours):
        rows: Any = learning_runs.train(options.variant, options.folder, settings, limit=options.limit)["rows"]
    trained = [row for row in rows[1:] if "seconds/step" in row]
    ours["seconds"] = [row["seconds/step"] for row in trained]
    ours["rewards"] = [row["reward/mean"] for row in trained]
    ours["equal_rewards"] = [0.0 for _ in trained]  # such groups are replaced
    ours["phases"] = {
        phase: statistics.median(row[phase] for row in trained[WARM_UP:] if phase in row)
        for phase in sorted({phase for row in trained[WARM_UP:] for phase in row if "seconds" in phase})
    }
    write(options, runs)
    print("\n".join(table(runs)))


def write(options: argparse.Namespace, runs: dict[str, dict[str, Any]]) -> None:
    options.results.mkdir(parents=True, exist_ok=True)
    facts = {"versions": learning_runs.versions(), "settings": options.settings, "runs": runs}
    (options.results / "peer_trl.json").write_text(json.dumps(facts, indent=1) + "\n")


def table(runs: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["| | s a step, median | completions with a gradient, a second | relative | peak GiB of the GPU |"]
    lines.append("|---|---|---|---|---|")
    rates = {name: rate(run) for name, run in runs.items() if len(run.get("seconds", [])) > WARM_UP}
    reference = next(reversed(rates.values()), 1.0)
    for name, run in runs.items():
        if name in rates:
            figures = f"{statistics.median(run['seconds'][WARM_UP:]):.2f} | {rates[name]:.1f}"
            lines.append(f"| {name} | {figures} | {rates[name] / reference:.2f} | {run.get('peak_gib', 0):.1f} |")
        else:
            lines.append(f"| {name} | {run.get('failure', 'too few steps')} | | | |")
    return lines


def rate(run: dict[str, Any]) -> float:
    """Return completions a second whose group has different rewards: others train nothing, or train in vain."""
    rollout = trl_runs.RECIPE["rollout"]
    completions = rollout["prompts_per_step"] * rollout["completions_per_prompt"]
    share = 1 - statistics.mean(run["equal_rewards"][WARM_UP:])
    return float(completions * share / statistics.mean(run["seconds"][WARM_UP:]))


if __name__ == "__main__":
    main()
