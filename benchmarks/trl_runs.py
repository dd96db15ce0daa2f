"""A run of TRL's GRPOTrainer with the model, prompts, rewards and sizes of a run of ours, in a process of its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from importlib.metadata import version
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from relax_pipeline.config import RunConfig
from relax_pipeline.rewards.build import build_scorer
from relax_pipeline.types import ScoreRequest

TRL: dict[str, dict[str, Any]] = {
    "transformers": {},
    "continuous-batching": {"use_transformers_continuous_batching": True},
    "vllm": {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.4},
}
"""TRL's ways to generate, as settings of GRPOConfig. For vLLM TRL itself sets RANK, MASTER_PORT and the like."""
LOSS: dict[str, Any] = {"loss_type": "dapo", "beta": 0.0, "epsilon": 0.2, "epsilon_high": 0.28}
OUTPUT: dict[str, Any] = {"report_to": "none", "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}


def train_with_trl(config: RunConfig, variant: str, at_once: int) -> dict[str, Any]:
    """Train in this process as a run of ours would; return seconds, mean reward and equal groups of each step."""
    import torch  # noqa: PLC0415 - in a process of its own
    from datasets import Dataset  # noqa: PLC0415
    from peft import LoraConfig  # noqa: PLC0415
    from transformers import TrainerCallback  # noqa: PLC0415
    from trl import GRPOTrainer  # noqa: PLC0415

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    score = build_scorer(config.rewards)

    def reward(prompts: list[Any], completions: list[Any], label: list[str], **_: Any) -> list[float]:
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        parts = zip(prompts, texts, label, strict=True)
        return [score(ScoreRequest(str(prompt), text, answer)).value for prompt, text, answer in parts]

    rows = [json.loads(line) for line in Path(config.data.train.path).read_text().splitlines()]
    trainer = GRPOTrainer(
        model=config.model.path,
        reward_funcs=reward,
        args=settings(config, variant, at_once, cuda=torch.cuda.is_available()),
        train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(r=config.lora.rank, lora_alpha=int(config.lora.alpha), target_modules="all-linear"),
        callbacks=[Clock()],
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    packages = ["torch", "transformers", "trl", *(["vllm"] if variant == "vllm" else [])]
    return {
        "seconds": [end - start for start, end in pairwise(ends)],
        "rewards": [entry["reward"] for entry in logged],
        "equal_rewards": [entry["frac_reward_zero_std"] for entry in logged],
        "versions": {name: version(name) for name in packages},
    }


def settings(config: RunConfig, variant: str, at_once: int, *, cuda: bool) -> Any:
    """Return TRL's GRPOConfig with one optimizer step a batch, at most `at_once` samples in a pass."""
    from trl import GRPOConfig  # noqa: PLC0415

    rollout = config.rollout
    samples = rollout.completions_per_step
    at_once = min(at_once, samples)
    vllm = {"vllm_max_model_length": config.longest_sequence} if variant == "vllm" else {}
    return GRPOConfig(
        output_dir=f"{config.output_dir}/trl",
        max_steps=config.steps,
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=samples // at_once,
        num_generations=rollout.completions_per_prompt,
        max_completion_length=rollout.max_new_tokens,
        learning_rate=config.optimizer.learning_rate,
        lr_scheduler_type="constant",
        bf16=config.model.dtype == "bfloat16",
        use_cpu=not cuda,
        model_init_kwargs={"dtype": config.model.dtype},
        gradient_checkpointing=False,
        **(LOSS | OUTPUT | TRL[variant] | vllm),
    )


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
