"""How a model lays several projections out in one weight: what only its model_type or config can tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from relax_pipeline.errors import MergeError
from relax_pipeline.merge.base import Base

Projection = Literal["gate_up_proj", "gate_proj", "up_proj", "down_proj"]
PROJECTIONS: tuple[Projection, ...] = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")

INTERLEAVED = frozenset({"gpt_oss"})
"""Rows of gate_up_proj alternate: gate 0, up 0, gate 1, …"""
IN_OUT_IN_MEMORY = frozenset({"gpt_oss"})
"""transformers computes with packed experts [experts, in, out]; for all others it is [experts, out, in]."""
CONCATENATED = frozenset({
    "afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe",
    "flex_olmo", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "hunyuan_v1_moe", "lfm2_moe", "llama4",
    "llama4_text", "longcat_flash", "minimax", "minimax_m2", "mixtral", "olmoe", "phi3", "phi4_multimodal", "phimoe",
    "qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen3_omni_moe", "qwen3_vl_moe",
    "qwen3_vl_moe_text", "solar_open",
})  # fmt: skip
"""All gate rows, then all up rows."""


def part_rows(base: Base, leaf: str, num_rows: int) -> slice:
    """Return the rows of a fused qkv_proj or gate_up_proj that are one of its projections.

    Raises:
        MergeError: The layout is not known.
    """
    if leaf in ("gate_proj", "up_proj"):
        return gate_up_rows(base, num_rows // 2)[leaf == "up_proj"]
    return _qkv_rows(base, leaf, num_rows)


def gate_up_rows(base: Base, half: int) -> tuple[slice, slice]:
    """Return the gate rows and the up rows of a fused gate_up_proj [2 * half, in].

    Raises:
        MergeError: Nothing is known of this model_type.
    """
    model_type = str(base.text_config.get("model_type") or base.config.get("model_type"))
    if model_type in INTERLEAVED:
        return slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    if model_type in CONCATENATED:
        return slice(0, half), slice(half, 2 * half)
    raise MergeError(
        f"model_type {model_type!r}: whether gate_up_proj concatenates gate and up or interleaves them is not known, "
        "and here adapter and base differ in whether they hold the two apart; add it to merge/layout.py"
    )


def _qkv_rows(base: Base, leaf: str, num_rows: int) -> slice:
    """Return the rows of a fused qkv_proj, [q, k, v] concatenated, that are one of the three."""
    config = base.text_config
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    q, kv = heads * head_dim, int(config.get("num_key_value_heads") or heads) * head_dim
    if num_rows != q + 2 * kv:
        raise MergeError(
            f"qkv_proj has {num_rows} rows, config.json's heads make {q} + 2 * {kv}: its layout is not known, "
            "so an adapter of q, k and v apart cannot be merged into it"
        )
    return {"q_proj": slice(0, q), "k_proj": slice(q, q + kv), "v_proj": slice(q + kv, q + 2 * kv)}[leaf]


def packed_experts_transposed(base: Base, parent: str, shapes: Mapping[Projection, tuple[int, ...]]) -> bool:
    """Return whether packed experts are stored [experts, in, out] rather than [experts, out, in].

    The hidden size of the config is what gate and up take in and what down gives out. A square weight says nothing,
    so all packed weights of one layer are looked at: they cannot all be square.

    Args:
        base: For its hidden size.
        parent: Module of the experts, for the message.
        shapes: Leaf name (gate_up_proj, gate_proj, up_proj, down_proj) to the 3-D shape.

    Raises:
        MergeError: The shapes contradict the config, or do not decide.
    """
    hidden, votes = base.text_config.get("hidden_size"), set()
    for leaf, (_, rows, columns) in shapes.items():
        if (rows == hidden) != (columns == hidden):
            votes.add((rows == hidden) != (leaf == "down_proj"))
    if len(votes) != 1:
        raise MergeError(
            f"{parent}: shapes {shapes} and hidden_size {hidden} of config.json do not tell whether experts are stored "
            "[out, in] or [in, out], so nothing was merged"
        )
    return votes.pop()
