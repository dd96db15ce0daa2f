"""A run of TRL's GRPOTrainer on the learning runs' model, prompts and rewards, in a process of its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import learning_runs
import yaml

from relax_pipeline.rewards.dapo import DapoScorer
from relax_pipeline.types import ScoreRequest

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
    """Train in this process; return seconds, mean reward and share of groups with equal rewards of each step."""
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
    return {
        "seconds": seconds,
        "rewards": rewards,
        "equal_rewards": [entry["frac_reward_zero_std"] for entry in trainer.state.log_history if "reward" in entry],
        "versions": {name: version(name) for name in packages},
    }


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
