"""Adapters that the peft library wrote, merged here and by peft's own merge_and_unload: the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma2Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
)

from relax_pipeline.errors import MergeError
from relax_pipeline.merge.logits import compare_logits
from relax_pipeline.merge.merge import merge_adapter
from tests.merging import whole, write_base

TEXT: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
MODELS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**TEXT),
    "qwen2": Qwen2Config(**TEXT),
    "qwen3": Qwen3Config(**TEXT),
    "gemma2": Gemma2Config(**TEXT | {"tie_word_embeddings": True}),
    "qwen3_moe": Qwen3MoeConfig(**TEXT, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=20),
    "mixtral": MixtralConfig(**TEXT, num_local_experts=3, num_experts_per_tok=2),
    "qwen2_vl": Qwen2VLConfig(
        text_config={**TEXT, "rope_scaling": ROPE},
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 24, "num_heads": 2, "mlp_ratio": 2},
        tie_word_embeddings=False,
    ),
    "qwen3_vl": Qwen3VLConfig(
        text_config={**TEXT, "rope_scaling": ROPE},
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 20,
            "num_heads": 2,
            "out_hidden_size": 24,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [1],
        },
        tie_word_embeddings=False,
    ),
}
LINEAR: dict[str, Any] = {"target_modules": "all-linear"}
EXPERTS: dict[str, Any] = {
    "target_modules": ["q_proj", "o_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


def load(name: str, folder: Path) -> PreTrainedModel:
    auto = AutoModelForImageTextToText if name.endswith("_vl") else AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


def write(name: str, tmp_path: Path, *, save_embedding_layers: bool = False, **lora: Any) -> None:
    """Write a random base, in several shards, and an adapter of it with random weights."""
    torch.manual_seed(0)
    auto = AutoModelForImageTextToText if name.endswith("_vl") else AutoModelForCausalLM
    auto.from_config(MODELS[name], dtype=torch.float32).save_pretrained(tmp_path / "base", max_shard_size="40KB")
    model = get_peft_model(
        load(name, tmp_path / "base"), LoraConfig(r=4, lora_alpha=6, init_lora_weights=False, **lora)
    )
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=save_embedding_layers)


def assert_merges_like_peft(name: str, tmp_path: Path, *, tolerance: float = 1e-6) -> None:
    """Merge both ways, load both models, compare every parameter."""
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    theirs = (
        PeftModel.from_pretrained(load(name, tmp_path / "base"), tmp_path / "adapter").merge_and_unload().state_dict()
    )
    ours, base = load(name, tmp_path / "out").state_dict(), load(name, tmp_path / "base").state_dict()
    assert ours.keys() == theirs.keys()
    assert any(not torch.equal(ours[key], base[key]) for key in ours)
    for key in ours:
        torch.testing.assert_close(
            ours[key], theirs[key], rtol=tolerance, atol=tolerance, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "qwen2_vl", "qwen3_vl"])
def test_all_linear_layers(tmp_path: Path, name: str) -> None:
    write(name, tmp_path, **LINEAR)
    assert_merges_like_peft(name, tmp_path)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_packed_experts_in_memory_that_lie_apart_on_disk(tmp_path: Path, name: str) -> None:
    write(name, tmp_path, **EXPERTS)
    assert_merges_like_peft(name, tmp_path)


@pytest.mark.parametrize(
    "lora",
    [
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.self_attn.v_proj": 9}},
        {"use_dora": True},
        {"modules_to_save": ["lm_head", "embed_tokens"]},
        {"layers_to_transform": [1]},
    ],
)
def test_variants(tmp_path: Path, lora: dict[str, Any]) -> None:
    write("qwen3", tmp_path, target_modules=["q_proj", "v_proj", "down_proj"], **lora)
    assert_merges_like_peft("qwen3", tmp_path)


@pytest.mark.parametrize("save_embedding_layers", [False, True])
def test_adapted_embedding_and_head(tmp_path: Path, save_embedding_layers: bool) -> None:
    targets = ["embed_tokens", "lm_head", "q_proj"]
    write("llama", tmp_path, target_modules=targets, save_embedding_layers=save_embedding_layers)
    assert_merges_like_peft("llama", tmp_path)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")  # peft looks at modules, not parameters
def test_expert_targets_named_as_before_transformers_5(tmp_path: Path) -> None:
    write("qwen3_moe", tmp_path, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
    assert_merges_like_peft("qwen3_moe", tmp_path)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # that is the point
@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_a_tied_model_with_one_side_adapted_answers_as_the_live_one(tmp_path: Path, target: str) -> None:
    """peft's merge_and_unload is wrong here: it adds the delta to the tensor that embedding and head share.

    So the reference is the live model, in which only the adapted side has the delta.
    """
    write("gemma2", tmp_path, target_modules=[target])
    report = merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", check_logits=True)
    assert report.logits is not None
    assert report.logits["merged_vs_adapter"] < 1e-5 < report.logits["base_vs_adapter"]


def test_logits_of_a_wrong_merge_are_noticed(tmp_path: Path) -> None:
    write("qwen3", tmp_path, **LINEAR)
    with pytest.raises(MergeError, match="nats from base"):
        compare_logits(tmp_path / "base", tmp_path / "adapter", tmp_path / "base")


def test_logits_of_a_model_that_does_not_run_here_are_refused(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", {"a.weight": whole(2, 3)}, config={"architectures": ["Unheard"]})
    with pytest.raises(MergeError, match="'Unheard'"):
        compare_logits(base, base, base)
