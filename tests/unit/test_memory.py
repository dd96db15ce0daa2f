from __future__ import annotations

from typing import Any

import pytest
from tiny_run import run_config
from transformers import Qwen3Config

from relax_pipeline.config import RunConfig
from relax_pipeline.memory import cache_bytes_per_token, trainer_memory

SHAPE = Qwen3Config(
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
)
GIB = 1 << 30


def megatron(**trainer: Any) -> RunConfig:
    return run_config(
        "unused",
        model={"path": "unused", "dtype": "bfloat16"},
        trainer={"kind": "megatron", "micro_batch_tokens": 8192, **trainer},
        data={"train": {"path": "unused"}, "max_prompt_tokens": 512},
        rollout={"max_new_tokens": 1024},
    )


@pytest.mark.parametrize(
    ("layout", "measured_gib"),
    [({}, 19.73), ({"tensor_parallel_size": 2}, 11.26), ({"context_parallel_size": 2}, 11.93)],
)
def test_peaks_measured_on_h200s_are_predicted(layout: dict[str, int], measured_gib: float) -> None:
    memory = trainer_memory(megatron(**layout), SHAPE, base_parameters=596_049_920, trained=20_185_088)
    assert memory is not None
    # When these were measured SwiGLU kept both of its factors, too.
    factors = 2 * 3072 // layout.get("tensor_parallel_size", 1) * 28 * memory.tokens * 2
    assert (memory.total + factors) / GIB == pytest.approx(measured_gib, rel=0.03)


def test_parts_by_hand() -> None:
    memory = trainer_memory(megatron(micro_batch_tokens=2048), SHAPE, base_parameters=596_049_920, trained=1000)
    assert memory is not None
    assert memory.tokens == 2048
    assert memory.weights == 2 * 596_049_920
    assert memory.trained == 18 * 1000
    assert memory.activations == 2 * 2048 * 28 * (4 * 1024 + 4 * 2048 + 3 * 1024 + 3 * 3072)
    assert memory.logits == 2 * 2 * 2048 * 151936 + 3 * 4 * (1 << 26)


def test_a_sequence_longer_than_the_budget_is_a_micro_batch_of_its_own() -> None:
    memory = trainer_memory(megatron(micro_batch_tokens=100), SHAPE, base_parameters=1, trained=1)
    assert memory is not None
    assert memory.tokens == 512 + 1024


def test_recomputation_keeps_the_inputs_of_layers_and_one_layer() -> None:
    memory = trainer_memory(megatron(recompute="full"), SHAPE, base_parameters=1, trained=1)
    assert memory is not None
    layer = 4 * 1024 + 4 * 2048 + 3 * 1024 + 3 * 3072
    assert memory.activations == 2 * 8192 * (28 * 1024 + layer)


def test_a_token_in_the_cache() -> None:
    assert cache_bytes_per_token(megatron(), SHAPE) == 2 * 28 * 8 * 128 * 2


def test_what_cannot_be_told_is_not() -> None:
    experts = Qwen3Config(num_experts=8)
    assert trainer_memory(megatron(), experts, base_parameters=1, trained=1) is None
    assert cache_bytes_per_token(megatron(), experts) is None
    fsdp = run_config("unused", trainer={"kind": "fsdp"})
    assert trainer_memory(fsdp, SHAPE, base_parameters=1, trained=1) is None
