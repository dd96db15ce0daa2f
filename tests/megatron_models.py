"""Tiny models of several families, random and initialised wide, so that a missed tensor shows in the logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_run import run_config
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from relax_pipeline.config import RunConfig

DENSE: dict[str, Any] = {
    "vocab_size": 80,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
MOE = DENSE | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DELTA_NET: dict[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", DENSE),
    "tied": ("qwen3", DENSE | {"tie_word_embeddings": True}),
    "odd": ("qwen3", DENSE | {"vocab_size": 83}),
    "llama": ("llama", DENSE),
    "qwen2": ("qwen2", {key: value for key, value in DENSE.items() if key != "head_dim"}),
    "moe": ("qwen3_moe", MOE),
    "delta": ("qwen3_5_text", DENSE | DELTA_NET),
    "delta_moe": (
        "qwen3_5_moe_text",
        MOE | DELTA_NET | {"shared_expert_intermediate_size": 24},
    ),
}


def write_model(folder: Path, family: str, *, dtype: torch.dtype = torch.float32) -> Path:
    """Write a Hugging Face folder without a tokenizer."""
    kind, values = FAMILIES[family]
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values)).to(dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            low = -0.5 if kind.startswith("qwen3_5") and "linear_attn" not in name else 0.5  # 1 + weight there
            torch.nn.init.uniform_(parameter, low, low + 1)
    model.save_pretrained(folder)
    return folder


def megatron_config(folder: Path, /, **sections: Any) -> RunConfig:
    """A float32 run of the Megatron trainer on the CPU, rank 4; sections are merged into these."""
    trainer = {"kind": "megatron", "device": "cpu", "micro_batch_tokens": 30} | sections.pop("trainer", {})
    values = {"lora": {"rank": 4, "alpha": 8}, "optimizer": {"learning_rate": 1e-2, "eps": 1e-3}}
    merged = {name: values.get(name, {}) | sections.get(name, {}) for name in values | sections}
    base = run_config(folder, **merged).model_dump()
    return RunConfig.model_validate(base | {"trainer": trainer})
