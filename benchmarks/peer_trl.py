"""The same reinforcement learning by TRL's GRPOTrainer, beside ours on the same GPU: seconds a step and peak memory.

    pip install --no-deps trl==1.16.0 datasets
    python benchmarks/peer_trl.py --folder /tmp/learning --results benchmarks/results

SmolLM2-135M, LoRA on all linear layers, one optimizer step a batch, the same prompts, rewards, lengths, learning rate.
TRL generates with transformers, once as it does by default and once with continuous batching; its vLLM path is not
measured.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import learning_runs
import yaml

from relax_pipeline.rewards.dapo import DapoScorer
from relax_pipeline.types import ScoreRequest

WARM_UP = 3
"""Steps at the start that are not counted."""
RECIPE = yaml.safe_load((learning_runs.RECIPES / "smollm2-arithmetic.yaml").read_text())


def reward(prompts: list[Any], completions: list[Any], label: list[str], **_: Any) -> list[float]:
    """Score as our recipe does, in the form TRL calls."""
    score = DapoScorer()
    texts = [completion[0]["content"] for completion in completions]
    return [
        score(ScoreRequest(prompt=str(prompt), completion=text, label=answer)).value
        for prompt, text, answer in zip(prompts, texts, label, strict=True)
    ]


def train_with_trl(folder: Path, steps: int, continuous_batching: bool, device: str) -> dict[str, Any]:
    """Train in this process; return seconds and mean reward of each step."""
    import torch  # noqa: PLC0415 - in a process of its own
    from datasets import Dataset  # noqa: PLC0415
    from peft import LoraConfig  # noqa: PLC0415
    from transformers import TrainerCallback  # noqa: PLC0415
    from trl import GRPOConfig, GRPOTrainer  # noqa: PLC0415

    class Clock(TrainerCallback):
        ends: list[float] = []  # noqa: RUF012

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if device == "cuda":
                torch.cuda.synchronize()
            self.ends.append(time.perf_counter())

    rollout, lora = RECIPE["rollout"], RECIPE["lora"]
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=steps,
        per_device_train_batch_size=rollout["prompts_per_step"] * rollout["completions_per_prompt"],
        num_generations=rollout["completions_per_prompt"],
        max_completion_length=rollout["max_new_tokens"],
        learning_rate=RECIPE["optimizer"]["learning_rate"],
        lr_scheduler_type="constant",
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        bf16=device == "cuda",
        use_cpu=device == "cpu",
        model_init_kwargs={"dtype": "bfloat16" if device == "cuda" else "float32"},
        gradient_checkpointing=False,
        use_transformers_continuous_batching=continuous_batching,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    rows = [json.loads(line) for line in (folder / "arithmetic" / "train.jsonl").read_text().splitlines()]
    trainer = GRPOTrainer(
        model=str(folder / "smollm2"),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(r=lora["rank"], lora_alpha=lora["alpha"], target_modules="all-linear"),
        callbacks=[Clock()],
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    seconds = [end - start for start, end in zip(Clock.ends, Clock.ends[1:], strict=False)]
    return {"seconds": seconds, "rewards": rewards}


def in_own_process(folder: Path, steps: int, continuous_batching: bool, device: str) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(train_with_trl, (folder, steps, continuous_batching, device))


@contextmanager
def peak_memory(figures: dict[str, Any]) -> Iterator[None]:
    """Put into figures the most memory, in GiB, that the first visible GPU had in use meanwhile."""
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        yield
        return
    over, most = threading.Event(), [0.0]

    def watch() -> None:
        while not over.wait(0.2):
            most[0] = max(most[0], torch.cuda.device_memory_used() / 2**30)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        figures["peak_gib"] = most[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where to work")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--limit", type=float, default=300, help="seconds our run may take")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--variant", choices=tuple(learning_runs.VARIANTS), default="megatron-sglang-adapter")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="for our run, as for train")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    learning_runs.prepare(options.folder)
    runs: dict[str, dict[str, Any]] = {}
    for name, batching in (("TRL, transformers", False), ("TRL, continuous batching", True)):
        memory: dict[str, Any] = {}
        try:
            with peak_memory(memory):
                runs[name] = in_own_process(options.folder, options.steps, batching, options.device) | memory
        except Exception as error:  # noqa: BLE001 - a peer's failure is a row of the table
            runs[name] = {"failure": f"{type(error).__name__}: {error}"[:300]}
        runs[name] |= memory
    ours: dict[str, Any] = {}
    settings = [f"steps={options.steps}", "checkpoint.every=1000", "evaluation.every=1000", *options.settings]
    with peak_memory(ours):
        run = learning_runs.train(options.variant, options.folder, settings, limit=options.limit)
    rows: Any = run["rows"]
    ours["seconds"] = [row["seconds/step"] for row in rows[1:] if "seconds/step" in row]
    ours["rewards"] = [row["reward/mean"] for row in rows if "reward/mean" in row]
    runs[f"relax-pipeline, {options.variant}"] = ours
    options.results.mkdir(parents=True, exist_ok=True)
    facts = {"versions": learning_runs.versions(), "settings": options.settings, "runs": runs}
    (options.results / "peer_trl.json").write_text(json.dumps(facts, indent=1) + "\n")
    print("\n".join(table(runs)))


def table(runs: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["| | s a step, median | relative | peak GiB of the GPU | mean reward, last 5 |", "|---|---|---|---|---|"]
    seconds = {name: statistics.median(run["seconds"][WARM_UP:]) for name, run in runs.items() if run.get("seconds")}
    reference = list(seconds.values())[-1]
    for name, run in runs.items():
        if name in seconds:
            figures = f"{seconds[name]:.2f} | {seconds[name] / reference:.2f} | {run.get('peak_gib', 0):.1f}"
            lines.append(f"| {name} | {figures} | {statistics.mean(run['rewards'][-5:]):.2f} |")
        else:
            lines.append(f"| {name} | {run.get('failure', 'no steps')} | | | |")
    return lines


if __name__ == "__main__":
    main()
