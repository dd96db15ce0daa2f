"""What the plan says of activations, against what real trainers keep: distinct storages that autograd saves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_models import DELTA_NET, DENSE, FAMILIES, MOE, megatron_config, sample, write_model

from relax_pipeline.config import RunConfig
from relax_pipeline.sizes import measure_model
from relax_pipeline.trainer.base import Trainer
from relax_pipeline.trainer.fsdp import FsdpTrainer
from relax_pipeline.types import TrainingSample

PROMPT, COMPLETION, VOCABULARY = 20, 44, 80  # the delta nets' fallback pads to multiples of 64
TOKENS = 3 * (PROMPT + COMPLETION)
WIDE = DENSE | {"hidden_size": 96, "intermediate_size": 160}
HYBRID = DELTA_NET | {"linear_value_head_dim": 24, "layer_types": ["full_attention", "linear_attention"] * 2}
TARGETS = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", WIDE),
    "two experts of four": ("qwen3_moe", MOE | WIDE | {"moe_intermediate_size": 56}),
    "three experts of six": ("qwen3_moe", MOE | WIDE | {"num_experts": 6, "num_experts_per_tok": 3}),
    "hybrid": ("qwen3_5_text", WIDE | HYBRID),
    "hybrid, shared expert": (
        "qwen3_5_moe_text",
        MOE | WIDE | HYBRID | {"moe_intermediate_size": 40, "shared_expert_intermediate_size": 72},
    ),
}


def configured(folder: Path, kind: str, shape: str, dtype: str = "float32") -> RunConfig:
    hybrid = "layer_types" in SHAPES[shape][1]
    return megatron_config(
        folder,
        model={"dtype": dtype},
        trainer={"kind": kind, "micro_batch_tokens": TOKENS},
        lora={"target_modules": [*TARGETS, *(["in_proj", "out_proj"] if hybrid else [])]},
        data={"max_prompt_tokens": PROMPT},
        rollout={"max_new_tokens": COMPLETION},
    )


def samples(*, padded: bool) -> list[TrainingSample]:
    """One micro-batch of three, whose advantages keep the loss from vanishing."""
    rows = [sample([5 + row] * (PROMPT - padded * row), [9 + row] * COMPLETION) for row in range(3)]
    return [replace(row, advantage=advantage) for row, advantage in zip(rows, (1.0, -1.0, 0.5), strict=True)]


def kept_bytes(trainer: Trainer, batch: list[TrainingSample], parameters: Iterable[torch.Tensor]) -> int:
    """Return what a pass keeps for the backward pass but parameters and logits."""
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own and tensor.shape[-1:] != (VOCABULARY,):
            kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no other takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        trainer.forward_backward(batch, temperature=1.0)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def predicted(config: RunConfig) -> int:
    memory = measure_model(config).trainer_memory
    assert memory is not None
    assert memory.tokens == TOKENS
    return memory.activations


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str) -> Path:
    monkeypatch.setitem(FAMILIES, shape, SHAPES[shape])
    return write_model(tmp_path / "model", shape)


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shape", SHAPES)
def test_megatron_keeps_what_is_predicted(folder: Path, shape: str) -> None:
    from relax_pipeline.trainer.megatron import MegatronTrainer

    config = configured(folder, "megatron", shape)
    trainer = MegatronTrainer(config)
    try:
        model = trainer._model.chunks[0]
        counted = kept_bytes(trainer, samples(padded=False), [*model.parameters(), *model.buffers()])
    finally:
        trainer.close()
    assert predicted(config) + on_a_cpu(SHAPES[shape][1]) == pytest.approx(counted, rel=0.05)


def on_a_cpu(values: Mapping[str, Any]) -> int:
    """Return the bytes of what attention keeps there only: its output anew, put together, and the gate's sigmoid."""
    layers: list[str] = values.get("layer_types", ["full_attention"] * values["num_hidden_layers"])
    copies = 2 if "linear_attention" in layers else 1
    heads = values["num_attention_heads"] * values["head_dim"]
    return 4 * TOKENS * layers.count("full_attention") * copies * heads


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", ["dense", "hybrid"])
@pytest.mark.filterwarnings("ignore")
def test_transformers_keeps_what_is_predicted(folder: Path, shape: str, dtype: str) -> None:
    config = configured(folder, "fsdp", shape, dtype)
    trainer = FsdpTrainer(config)
    model = trainer._policy.model
    counted = kept_bytes(trainer, samples(padded=True), [*model.parameters(), *model.buffers()])
    assert predicted(config) == pytest.approx(counted, rel=0.05)
