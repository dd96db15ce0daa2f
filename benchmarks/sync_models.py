"""Models of random weights in the shapes that are measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

DENSE: Mapping[str, Any] = {
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "initializer_range": 0.05,  # with the usual 0.02 all tokens are about equally likely
    "tie_word_embeddings": True,
}
EXPERTS: Mapping[str, Any] = {"norm_topk_prob": True, "tie_word_embeddings": False}
"""As in Qwen3-30B-A3B; SGLang's Qwen3MoeForCausalLM knows no tied head."""
TINY = DENSE | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "initializer_range": 0.15,
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "tiny": TINY,
    "tiny-A3B": TINY | EXPERTS | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "0.6B": DENSE
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": DENSE | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "half-30B-A3B": DENSE
    | EXPERTS
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_attention_heads": 32}
    | {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
}
"""Of Qwen3. The largest has 24 of the 48 layers of Qwen3-30B-A3B: a trainer and an engine of all of them do not fit
one GPU."""


def make_model(folder: Path, shape: str, *, layers: int | None = None, dtype: str = "bfloat16") -> Path:
    """Write a model of random weights below the folder, unless it is there; `layers`: fewer than the shape has."""
    path = folder / "-".join([shape, dtype, *([f"{layers}-layers"] if layers else [])])
    if (path / "config.json").is_file():
        return path
    values = {**SHAPES[shape], "max_position_embeddings": 4096, "dtype": dtype}
    values |= {"num_hidden_layers": layers} if layers else {}
    make_config = Qwen3MoeConfig if "num_experts" in values else Qwen3Config
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(make_config(**values), dtype=getattr(torch, dtype))
    model.save_pretrained(path)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return path
