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
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import learning_runs
import yaml

from relax_pipeline.rewards.dapo import DapoScorer
from relax_pipeline.types import ScoreRequest

WARM_UP = 3
"""Steps at the start that are not counted."""
TRL: dict[str, dict[str, Any]] = {
    "transformers": {},
    "continuous-batching": {"use_transformers_continuous_batching": True},
    "vllm": {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.4},
}
"""TRL's ways to generate, as settings of GRPOConfig. For vLLM TRL itself sets RANK, MASTER_PORT and the like."""
LOSS: dict[str, Any] = {"loss_type": "dapo", "beta": 0.0, "epsilon": 0.2, "epsilon_high": 0.28}
OUTPUT: dict[str, Any] = {"report_to": "none", "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
RECIPE = yaml.safe_load((learning_runs.RECIPES / "smollm2-arithmetic.yaml").read_text())


def reward(prompts: list[Any], completions: list[Any], label: list[str], **_: Any) -> list[float]:
    """Score as our recipe does, in the form TRL calls."""
    score = DapoScorer()
    return [
        score(ScoreRequest(prompt=str(prompt), completion=completion[0]["content"], label=answer)).value
        for prompt, completion, answer in zip(prompts, completions, label, strict=True)
    ]


def train_with_trl(folder: Path, steps: int, variant: str, device: str) -> dict[str, Any]:
    """Train in this process; return seconds and mean reward of each step, and versions."""
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
        bf16=device == "cuda",
        use_cpu=device == "cpu",
        model_init_kwargs={"dtype": "bfloat16" if device == "cuda" else "float32"},
        gradient_checkpointing=False,
        **(LOSS | OUTPUT | TRL[variant]),
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
    packages = ["torch", "transformers", "trl", *(["vllm"] if variant == "vllm" else [])]
    return {"seconds": seconds, "rewards": rewards, "versions": {name: version(name) for name in packages}}


def send_run(sender: Connection, path: list[str], *run: Any) -> None:
    """Train with the folders of path put first, and send what came of it: a peer's failure is a row of the table."""
    sys.path[:0] = path
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        sender.send(train_with_trl(*run))
    except Exception as error:  # noqa: BLE001
        sender.send({"failure": " ".join(f"{type(error).__name__}: {error}".split())[:300]})


def in_own_process(limit: float, path: list[str], *run: Any) -> dict[str, Any]:
    """Return what a process of its own sends; end it then, whatever it still holds."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=send_run, args=(sender, path, *run))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(limit) else {"failure": f"sent nothing in {limit:.0f} s"}
    except EOFError:
        return {"failure": "its process was killed"}
    finally:
        process.kill()
        process.join()


@contextmanager
def peak_memory(figures: dict[str, Any]) -> Iterator[None]:
    """Put into figures the most memory, in GiB, that the first visible GPU had in use meanwhile."""
    import torch  # noqa: PLC0415

    over = threading.Event()

    def watch() -> None:
        while torch.cuda.is_available() and not over.wait(0.2):
            figures["peak_gib"] = max(figures.get("peak_gib", 0.0), torch.cuda.device_memory_used() / 2**30)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where to work")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--limit", type=float, default=300, help="seconds a run may take")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--trl", nargs="*", choices=tuple(TRL), default=tuple(TRL), help="how TRL generates")
    parser.add_argument("--trl-path", nargs="*", default=[], help="folders of packages for TRL's processes alone")
    parser.add_argument("--variant", choices=tuple(learning_runs.VARIANTS), default="megatron-sglang-adapter")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="for our run, as for train")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    learning_runs.prepare(options.folder)
    runs: dict[str, dict[str, Any]] = {}
    for variant in options.trl:
        figures = runs[f"TRL, {variant}"] = {}
        with peak_memory(figures):
            run = (options.folder, options.steps, variant, options.device)
            figures |= in_own_process(options.limit, options.trl_path, *run)
        write(options, runs)
    ours = runs[f"relax-pipeline, {options.variant}"] = {}
    settings = [f"steps={options.steps}", "checkpoint.every=1000", "evaluation.every=1000", *options.settings]
    with peak_memory(ours):
        rows: Any = learning_runs.train(options.variant, options.folder, settings, limit=options.limit)["rows"]
    ours["seconds"] = [row["seconds/step"] for row in rows[1:] if "seconds/step" in row]
    ours["rewards"] = [row["reward/mean"] for row in rows if "reward/mean" in row]
    write(options, runs)
    print("\n".join(table(runs)))


def write(options: argparse.Namespace, runs: dict[str, dict[str, Any]]) -> None:
    options.results.mkdir(parents=True, exist_ok=True)
    facts = {"versions": learning_runs.versions(), "settings": options.settings, "runs": runs}
    (options.results / "peer_trl.json").write_text(json.dumps(facts, indent=1) + "\n")


def table(runs: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["| | s a step, median | relative | peak GiB of the GPU | mean reward, last 5 |", "|---|---|---|---|---|"]
    counted = {name: run["seconds"][WARM_UP:] for name, run in runs.items() if "seconds" in run}
    seconds = {name: statistics.median(times) for name, times in counted.items() if times}
    reference = next(reversed(seconds.values()), 1.0)
    for name, run in runs.items():
        if name in seconds:
            figures = f"{seconds[name]:.2f} | {seconds[name] / reference:.2f} | {run.get('peak_gib', 0):.1f}"
            lines.append(f"| {name} | {figures} | {statistics.mean(run['rewards'][-5:]):.2f} |")
        else:
            lines.append(f"| {name} | {run.get('failure', 'too few steps')} | | | |")
    return lines


if __name__ == "__main__":
    main()
