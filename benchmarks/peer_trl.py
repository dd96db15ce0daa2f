"""The same reinforcement learning by TRL's GRPOTrainer, beside ours on the same GPU: seconds a step and peak memory.

    pip install --no-deps trl==1.16.0 datasets
    pip install --target /tmp/vllm vllm==0.26.0    # the last for torch 2.11; its openai is newer than SGLang's
    python benchmarks/peer_trl.py --folder /tmp/learning --trl-path /tmp/vllm

SmolLM2-135M, or random weights of a shape; LoRA on all linear layers, one optimizer step a batch, the same prompts,
rewards, lengths, learning rate: TRL's settings follow from our run's.
TRL generates with transformers, with continuous batching, and with vLLM in the process and on the GPU that train.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import breakdown
import learning_runs
import trl_runs
from sync_models import SHAPES

from relax_pipeline.config.loading import load_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where to work")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--shape", choices=SHAPES, help="random weights and long completions, as in breakdown.py")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=3, help="steps at the start that are not counted")
    parser.add_argument("--at-once", type=int, default=64, help="samples in one pass of TRL's")
    parser.add_argument("--limit", type=float, default=300, help="seconds a run may take")
    parser.add_argument(
        "--trl", nargs="*", choices=tuple(trl_runs.TRL), default=tuple(trl_runs.TRL), help="how TRL generates"
    )
    parser.add_argument("--trl-path", nargs="*", default=[], help="folders of packages for TRL's processes alone")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=tuple(learning_runs.VARIANTS),
        default=["megatron-sglang-adapter", "megatron-sglang-ahead"],
        help="of ours; the first is what the others are relative to",
    )
    parser.add_argument("--set", dest="settings", action="append", default=[], help="for our run, as for train")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    settings = prepare(options)
    config = load_config(learning_runs.RECIPE, learning_runs.overrides(options.variants[0], options.folder, settings))
    runs: dict[str, dict[str, Any]] = {}
    for variant in options.trl:
        figures = runs[f"TRL, {variant}"] = {}
        with learning_runs.peak_memory(figures):
            figures |= trl_runs.in_own_process(options.limit, options.trl_path, config, variant, options.at_once)
        write(options, runs)
    for variant in options.variants:
        runs[f"relax-pipeline, {variant}"] = train_ours(variant, settings, options)
        write(options, runs)
    print("\n".join(table(runs, config.rollout.completions_per_step, options.warm_up)))


def train_ours(variant: str, settings: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a run of ours."""
    figures: dict[str, Any] = {}
    with learning_runs.peak_memory(figures):
        rows: Any = learning_runs.train(variant, options.folder, settings, limit=options.limit)["rows"]
    trained = [row for row in rows[1:] if "seconds/step" in row]
    figures["seconds"] = [row["seconds/step"] for row in trained]
    figures["rewards"] = [row["reward/mean"] for row in trained]
    figures["equal_rewards"] = [0.0 for _ in trained]  # such groups are replaced
    counted = trained[options.warm_up :]
    figures["phases"] = {
        phase: statistics.median(row[phase] for row in counted if phase in row)
        for phase in sorted({phase for row in counted for phase in row if "seconds" in phase})
    }
    return figures


def prepare(options: argparse.Namespace) -> list[str]:
    """Make model and prompts, and return our run's settings, which TRL's follow."""
    if options.shape:
        settings = breakdown.settings(breakdown.prepare(options.folder, options.shape), options)
    else:
        learning_runs.prepare(options.folder)
        settings = [f"steps={options.steps}", *options.settings]
    return [*settings, "checkpoint.every=1000", "evaluation=null"]


def write(options: argparse.Namespace, runs: dict[str, dict[str, Any]]) -> None:
    options.results.mkdir(parents=True, exist_ok=True)
    facts = {"versions": learning_runs.versions(), "settings": options.settings, "runs": runs}
    (options.results / "peer_trl.json").write_text(json.dumps(facts, indent=1) + "\n")


def table(runs: dict[str, dict[str, Any]], samples: int, warm_up: int) -> list[str]:
    lines = ["| | s a step, median | completions with a gradient, a second | relative | peak GiB of the GPU |"]
    lines.append("|---|---|---|---|---|")
    counted = {name: run for name, run in runs.items() if len(run.get("seconds", [])) > warm_up}
    rates = {name: rate(run, samples, warm_up) for name, run in counted.items()}
    reference = next((rate for name, rate in rates.items() if name.startswith("relax")), 1.0)
    for name, run in runs.items():
        if name in rates:
            figures = f"{statistics.median(run['seconds'][warm_up:]):.2f} | {rates[name]:.1f}"
            lines.append(f"| {name} | {figures} | {rates[name] / reference:.2f} | {run.get('peak_gib', 0):.1f} |")
        else:
            lines.append(f"| {name} | {run.get('failure', 'too few steps')} | | | |")
    return lines


def rate(run: dict[str, Any], samples: int, warm_up: int) -> float:
    """Return completions a second whose group has different rewards: others train nothing, or train in vain."""
    share = 1 - statistics.mean(run["equal_rewards"][warm_up:])
    return float(samples * share / statistics.mean(run["seconds"][warm_up:]))


if __name__ == "__main__":
    main()
