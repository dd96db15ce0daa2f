"""The recipes in deployments/recipes, planned on models of the real shape whose weights are not there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from relax_pipeline.config import load_config
from relax_pipeline.plan import make_plan

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "deployments" / "recipes"
DEMO_MODEL = ROOT / "deployments" / "demo" / "model"
QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
A3B = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
}

A3B_VL = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": A3B,
    "vision_config": {"model_type": "qwen3_5_moe", "depth": 27, "hidden_size": 1152, "out_hidden_size": 2048},
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("recipe", "shape", "mode"),
    [
        ("qwen3-4b-merge-colocate-8gpu", QWEN3_4B, "merge"),
        ("qwen3-4b-merge-colocate-8gpu", QWEN3_4B, "adapter"),
        ("qwen3-4b-adapter-async-8gpu", QWEN3_4B, "adapter"),
        ("qwen3-4b-adapter-async-8gpu", QWEN3_4B, "merge"),
        ("qwen36-35b-a3b-adapter-async-16gpu", A3B, "adapter"),
        ("qwen36-35b-a3b-adapter-async-16gpu", A3B_VL, "adapter"),
        ("qwen36-35b-a3b-vl-merge-8gpu", A3B_VL, "merge"),
    ],
)
def test_recipe_is_accepted(recipe: str, shape: dict[str, Any], mode: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(shape))
    save_file({"placeholder": torch.zeros(1)}, model / "model.safetensors")
    for file in DEMO_MODEL.glob("*token*"):
        shutil.copy(file, model)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "1+1=", "label": "2"}) + "\n")
    settings = [f"model.path={model}", f"output_dir={tmp_path / 'runs'}", f"data.train.path={prompts}"]
    settings += ["data.chat_template=false", f"sync.mode={mode}"]
    if "evaluation" in (RECIPES / f"{recipe}.yaml").read_text():
        settings.append(f"evaluation.source.path={prompts}")
    plan = make_plan(load_config(RECIPES / f"{recipe}.yaml", settings))
    # The disk of the machine that tests need not hold what the run would keep.
    assert [refusal for refusal in plan.refusals if not refusal.startswith("output_dir: ")] == []
    assert plan.sizes is not None
    assert plan.sizes.adapted_modules > 0
