"""The recipe's real model: converted from the package that carries it, and trained for two steps on a CPU."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from relax_pipeline.build import open_session
from relax_pipeline.config import RunConfig, load_config
from relax_pipeline.data.arithmetic import word_problems
from relax_pipeline.session.session import TrainingSession

pytestmark = pytest.mark.slow

RECIPES = Path("deployments/recipes")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the converted model."""
    folder = tmp_path_factory.mktemp("smollm2")
    subprocess.run([sys.executable, str(RECIPES / "make_smollm2.py"), str(folder)], check=True)
    return folder


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)


def small_recipe(model: Path, folder: Path) -> RunConfig:
    """The recipe with tiny settings, and partial credit, so that two completions seldom earn the same.

    One thread a process: on a busy machine, threads that wait for each other are many times slower.
    """
    rows = [row | {"label": f"Answer: {row['label']}"} for row in word_problems(4, seed=0)]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "output_dir": folder / "runs",
        "steps": 2,
        "model.path": model,
        "lora.rank": 4,
        "lora.alpha": 4,
        "data.train.path": prompts,
        "evaluation.source": f"{{path: {prompts}, max_rows: 2}}",
        "rollout": "{prompts_per_step: 2, completions_per_prompt: 2, max_new_tokens: 24, drop_zero_variance: false}",
        "rewards": "{scorers: [{kind: f1}], workers: 1}",
        "optimizer.learning_rate": 1e-3,
        "cluster.num_cpus": 1,
    }
    return load_config(RECIPES / "smollm2-arithmetic.yaml", [f"{key}={value}" for key, value in settings.items()])


def take_step(session: TrainingSession, step: int) -> dict[str, float]:
    session.rollout(step)
    session.score(step)
    session.train(step)
    session.sync()
    return session.finish_step(step)


def test_converted_model_knows_the_capital_of_france(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2, local_files_only=True)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output_BT = load(smollm2).generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output_BT[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_two_steps_train_a_verified_adapter(smollm2: Path, tmp_path: Path) -> None:
    with open_session(small_recipe(smollm2, tmp_path)) as session:
        session.restore()
        session.sync()
        rows = [take_step(session, step) for step in (1, 2)]
        heldout = session.evaluate()
        checkpoint = session.save(2)

    assert [row["policy_version"] for row in rows] == [1.0, 2.0]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert all(row["train/grad_norm"] > 0 for row in rows)
    assert all(row["sync/probe_difference"] < 1e-3 for row in rows)
    assert heldout["eval/policy_version"] == 2.0

    adapted = PeftModel.from_pretrained(load(smollm2), checkpoint.path / "adapter")
    changed = [name for name, weight in adapted.named_parameters() if "lora_B" in name and weight.any()]
    assert len(changed) == 30 * 7
