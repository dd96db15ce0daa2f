"""Where the time of a step goes: 64 prompts x 8 completions of 1,024 tokens, random weights, a whole flow run.

    python benchmarks/breakdown.py --shape 4B --folder /disk/with/room --results benchmarks/results --set KEY=VALUE ...
    python benchmarks/breakdown.py --shape tiny --folder /tmp/tiny     # on a CPU, to see that it works

Random weights never end a text, so all completions have the full length; the last token's number decides the reward.
The first step warms up and is not counted.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import learning_runs
from sync_models import SHAPES, make_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PROMPT_TOKENS = 256
PHASES = {
    "generate": "seconds/generate",
    "score": "seconds/score",
    "forward and backward": "train/forward_backward_seconds",
    "optimizer": "train/optimizer_seconds",
    "export": "sync/export_seconds",
    "transfer": "sync/transfer_seconds",
    "activate": "sync/activate_seconds",
    "verify": "sync/verify_seconds",
    "pause of the engines": "sync/pause_seconds",
    "save": "seconds/save",
    "whole step": "seconds/step",
}


def prepare(folder: Path, shape: str) -> Path:
    """Write a model with a tokenizer whose words are numbers, and prompts of random words; return the model folder."""
    model = make_model(folder, shape)
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    special = {"unk_token": "<unknown>", "eos_token": "<end>", "pad_token": "<padding>"}
    words = [*special.values(), *(f"w{number}" for number in range(len(special), size))]
    tokenizer = Tokenizer(models.WordLevel(dict(zip(words, range(size), strict=True)), unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(model)
    draw = random.Random(0)
    rows = [" ".join(draw.choices(words[len(special) :], k=PROMPT_TOKENS)) for _ in range(512)]
    lines = [json.dumps({"prompt": row, "label": "even"}) for row in rows]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return model


def settings(model: Path, options: argparse.Namespace) -> list[str]:
    tiny = options.shape == "tiny"
    return [
        f"steps={options.steps}",
        f"model.path={model}",
        f"data.train.path={options.folder / 'prompts.jsonl'}",
        f"data.max_prompt_tokens={PROMPT_TOKENS}",
        "data.chat_template=false",
        "evaluation=null",
        f"rollout.prompts_per_step={4 if tiny else 64}",
        f"rollout.max_new_tokens={32 if tiny else 1024}",
        "rewards={scorers: [{kind: regex, options: {pattern: '[02468]$'}}]}",
        f"checkpoint.every={options.steps}",
        "sync.probe_tolerance=1",  # random weights amplify the rounding of either side
        f"model.dtype={'float32' if tiny else 'bfloat16'}",
        *options.settings,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="4B")
    parser.add_argument("--folder", type=Path, required=True, help="model, prompts and the run go here")
    parser.add_argument("--results", type=Path, help="JSON of all rows goes into this folder")
    parser.add_argument("--variant", choices=tuple(learning_runs.VARIANTS), default="megatron-sglang-adapter")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--limit", type=float, default=600, help="seconds the run may take")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="as for train")
    options = parser.parse_args()
    model = prepare(options.folder, options.shape)
    memory: dict[str, Any] = {}
    with learning_runs.peak_memory(memory):
        run = learning_runs.train(options.variant, options.folder, settings(model, options), limit=options.limit)
    rows: Any = run["rows"]
    if options.results:
        options.results.mkdir(parents=True, exist_ok=True)
        facts = {"versions": learning_runs.versions(), "shape": options.shape} | run | memory
        (options.results / f"breakdown-{options.shape}.json").write_text(json.dumps(facts, indent=1) + "\n")
    if run["status"]:
        raise SystemExit(f"the run ended with {run['status']} after {len(rows)} steps")
    print("\n".join(table(rows, memory.get("peak_gib"))))


def table(rows: Sequence[Mapping[str, float]], peak_gib: float | None) -> list[str]:
    counted = [row for row in rows if row["step"] > 1]
    whole = statistics.median(row["seconds/step"] for row in counted)
    lines = ["| phase | s, median | share of the step |", "|---|---|---|"]
    for phase, key in PHASES.items():
        if values := [row[key] for row in counted if key in row]:
            seconds = statistics.median(values)
            lines.append(f"| {phase} | {seconds:.2f} | {seconds / whole:.0%} |")
    tokens = statistics.median(row["rollout/tokens"] for row in counted)
    lines.append(f"| completion tokens a second, whole step | {tokens / whole:,.0f} | |")
    return [*lines, f"| most memory in use, GiB | {peak_gib:.1f} | |"] if peak_gib else lines


if __name__ == "__main__":
    main()
