"""Tiny models of several families, random and initialised wide, so that a missed tensor shows in the logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_run import run_config
from transformers import AutoConfig, PreTrainedModel

from relax_pipeline.config import RunConfig
from relax_pipeline.models import model_class
from relax_pipeline.types import TrainingSample

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
HEADS_FILL = {key: value for key, value in DENSE.items() if key != "head_dim"}
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
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "out_hidden_size": 32,
}


def seeing(text: dict[str, Any], *, tied: bool = False, **vision: Any) -> dict[str, Any]:
    """A model with a part that sees; the tokens that stand for pictures are among the text's."""
    tie = {"tie_word_embeddings": tied}
    marks = {"image_token_id": 70, "video_token_id": 71, "vision_start_token_id": 72, "vision_end_token_id": 73}
    return {"text_config": text | tie, "vision_config": VISION | vision} | marks | tie


def rotary(*section: int) -> dict[str, Any]:
    """The rotary embedding of places in time, height and width."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section)}}


DELTA_MOE = MOE | DELTA_NET | {"shared_expert_intermediate_size": 24}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", DENSE),
    "tied": ("qwen3", DENSE | {"tie_word_embeddings": True}),
    "odd": ("qwen3", DENSE | {"vocab_size": 83}),
    "llama": ("llama", DENSE),
    "qwen2": ("qwen2", HEADS_FILL),
    "moe": ("qwen3_moe", MOE),
    "delta": ("qwen3_5_text", DENSE | DELTA_NET),
    "delta_moe": ("qwen3_5_moe_text", DELTA_MOE),
    "qwen3_vl": ("qwen3_vl", seeing(DENSE | rotary(4, 2, 2), deepstack_visual_indexes=[0])),
    "qwen2_5_vl": ("qwen2_5_vl", seeing(HEADS_FILL | rotary(2, 1, 1), tied=True, fullatt_block_indexes=[1])),
    "delta_moe_vl": ("qwen3_5_moe", seeing(DELTA_MOE)),
}


def write_model(folder: Path, family: str, *, dtype: torch.dtype = torch.float32) -> Path:
    """Write a Hugging Face folder without a tokenizer."""
    kind, values = FAMILIES[family]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **values)
    model: PreTrainedModel = model_class(config).from_config(config).to(dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            from_one = kind.startswith("qwen3_5") and "linear_attn" not in name and "visual" not in name
            low = -0.5 if from_one else 0.5  # 1 + weight there
            torch.nn.init.uniform_(parameter, low, low + 1)
    # The models that see of this kind pack their experts, which transformers would undo.
    model.save_pretrained(folder, save_original_format=kind != "qwen3_5_moe")
    return folder


def megatron_config(folder: Path, /, **sections: Any) -> RunConfig:
    """A float32 run of the Megatron trainer on the CPU, rank 4; sections are merged into these."""
    trainer = {"kind": "megatron", "device": "cpu", "micro_batch_tokens": 30} | sections.pop("trainer", {})
    values = {"lora": {"rank": 4, "alpha": 8}, "optimizer": {"learning_rate": 1e-2, "eps": 1e-3}}
    merged = {name: values.get(name, {}) | sections.get(name, {}) for name in values | sections}
    base = run_config(folder, **merged).model_dump()
    return RunConfig.model_validate(base | {"trainer": trainer})


def sample(prompt: list[int], completion: list[int]) -> TrainingSample:
    size = len(completion)
    return TrainingSample(
        prompt_ids=np.array(prompt),
        completion_ids=np.array(completion),
        loss_mask=np.ones(size, dtype=bool),
        rollout_logprobs=np.zeros(size, dtype=np.float32),
        advantage=1.0,
        policy_version=0,
    )
