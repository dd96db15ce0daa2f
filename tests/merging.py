"""Small checkpoints and adapters with exact merges: all values are small integers, which bfloat16 holds as they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

PREFIX = "base_model.model."
CONFIG = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False}
Q = "model.layers.0.self_attn.q_proj"


def whole(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return integers from -3 to 3."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def write_base(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    config: Mapping[str, Any] = CONFIG,
    shards: int = 1,
    files: Mapping[str, str] | None = None,
) -> Path:
    """Write a checkpoint: one file, or several with the tensors dealt out in turn."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    names = list(tensors)
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    else:
        weight_map = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            part = {name: tensors[name] for name in names[shard::shards]}
            save_file(part, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, content in (files or {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def write_lora(
    folder: Path, tensors: Mapping[str, torch.Tensor], *, rank: int = 2, alpha: float = 4, **more: Any
) -> Path:
    """Write an adapter folder; alpha / rank is 2 unless said otherwise."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": ["q_proj"], "bias": "none", **more}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    apart = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(apart, folder / "adapter_model.safetensors")
    return folder


def pair(module: str, A: torch.Tensor, B: torch.Tensor, prefix: str = PREFIX) -> dict[str, torch.Tensor]:
    """Return the two keys of one module."""
    return {f"{prefix}{module}.lora_A.weight": A, f"{prefix}{module}.lora_B.weight": B}


def read_model(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def added(weight: torch.Tensor, A: torch.Tensor, B: torch.Tensor, scaling: float = 2.0) -> torch.Tensor:
    """Return weight + scaling * B @ A, exact where the values are."""
    return (weight.double() + scaling * (B.double() @ A.double())).to(weight.dtype)
