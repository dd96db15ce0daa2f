"""Models of random weights in the shapes that are measured."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
"""Of Qwen3."""


def make_model(folder: Path, shape: str) -> None:
    """Write a Qwen3 of random bfloat16 weights, unless it is there."""
    if (folder / "config.json").is_file():
        return
    tiny = shape == "tiny"
    config = Qwen3Config(
        **SHAPES[shape],
        vocab_size=512 if tiny else 151936,
        num_key_value_heads=min(8, SHAPES[shape]["num_attention_heads"]),
        head_dim=16 if tiny else 128,
        initializer_range=0.15 if tiny else 0.05,  # with the usual 0.02 all tokens are about equally likely
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
