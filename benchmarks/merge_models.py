"""What `merge.py` merges: random numbers in the shape of Qwen3-4B, and an adapter on all linear layers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from relax_pipeline.safetensors_io.header import TensorInfo, build_header

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
"""The shape of Qwen3-4B: 8.04 GB in bfloat16."""
LINEAR = {
    "self_attn.q_proj": (4096, 2560),
    "self_attn.k_proj": (1024, 2560),
    "self_attn.v_proj": (1024, 2560),
    "self_attn.o_proj": (2560, 4096),
    "mlp.gate_proj": (9728, 2560),
    "mlp.up_proj": (9728, 2560),
    "mlp.down_proj": (2560, 9728),
}
NORMS = {"input_layernorm": 2560, "post_attention_layernorm": 2560, "self_attn.q_norm": 128, "self_attn.k_norm": 128}
RANK = 32
NUM_SHARDS = 4


def layer_shapes(num_layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for layer in range(num_layers):
        for leaf, shape in LINEAR.items():
            yield f"model.layers.{layer}.{leaf}.weight", shape
        for leaf, size in NORMS.items():
            yield f"model.layers.{layer}.{leaf}.weight", (size,)


def write_base(folder: Path, num_layers: int) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": num_layers}))
    shapes = {
        "model.embed_tokens.weight": (151936, 2560),
        **dict(layer_shapes(num_layers)),
        "model.norm.weight": (2560,),
    }
    infos = [TensorInfo(name, "BF16", shape, 0) for name, shape in shapes.items()]
    share, shards = sum(info.num_bytes for info in infos) / NUM_SHARDS, [[] for _ in range(NUM_SHARDS)]
    written = 0
    for info in infos:
        shards[min(NUM_SHARDS - 1, int(written / share))].append(info)
        written += info.num_bytes
    noise = (torch.randn(1 << 25) * 0.02).bfloat16().view(torch.uint8).numpy()
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{NUM_SHARDS:05}.safetensors"
        header = build_header(shard, {"format": "pt"})
        with (folder / file).open("wb") as stream:
            stream.write(header.raw)
            for info in header.tensors:
                for start in range(0, info.num_bytes, len(noise)):
                    stream.write(noise[: min(len(noise), info.num_bytes - start)])
        weight_map |= {info.name: file for info in header.tensors}
    index = {"metadata": {"total_size": written}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_adapter(folder: Path, num_layers: int) -> None:
    folder.mkdir(parents=True)
    leaves = sorted(name.rpartition(".")[2] for name in LINEAR)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": leaves,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for name, (rows, columns) in ((n, s) for n, s in layer_shapes(num_layers) if len(s) == 2):
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = (torch.randn(RANK, columns) * 0.02).bfloat16()
        tensors[f"{module}.lora_B.weight"] = (torch.randn(rows, RANK) * 0.01).bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors")
