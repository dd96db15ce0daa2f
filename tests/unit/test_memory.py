from __future__ import annotations

from typing import Any

import pytest
from tiny_run import run_config
from transformers import GPT2Config, Qwen3Config, Qwen3MoeConfig, Qwen3NextConfig

from relax_pipeline.config import RunConfig
from relax_pipeline.memory import Parameters, TrainerMemory, adapter_parameters, trainer_memory
from relax_pipeline.memory_layers import kept_by_megatron

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
ONE = Parameters(1)


EXPERTS = Qwen3MoeConfig(
    vocab_size=80,
    hidden_size=96,
    moe_intermediate_size=40,
    num_hidden_layers=5,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=3,
)


def megatron(**trainer: Any) -> RunConfig:
    return configured({"kind": "megatron", **trainer})


def fsdp(**trainer: Any) -> RunConfig:
    return configured({"kind": "fsdp", **trainer})


def configured(trainer: dict[str, Any]) -> RunConfig:
    return run_config(
        "unused",
        model={"path": "unused", "dtype": "bfloat16"},
        trainer={"micro_batch_tokens": 8192, **trainer},
        data={"train": {"path": "unused"}, "max_prompt_tokens": 512},
        rollout={"max_new_tokens": 1024},
    )


def of_rank(config: RunConfig, shape: Any, base: Parameters = ONE, trained: Parameters = ONE) -> TrainerMemory:
    memory = trainer_memory(config, shape, base=base, trained=trained)
    assert memory is not None
    return memory


@pytest.mark.parametrize(
    ("layout", "measured_gib"),
    [({}, 19.73), ({"tensor_parallel_size": 2}, 11.26), ({"context_parallel_size": 2}, 11.93)],
)
def test_peaks_measured_on_h200s_are_predicted(layout: dict[str, int], measured_gib: float) -> None:
    memory = of_rank(megatron(**layout), SHAPE, Parameters(596_049_920), Parameters(20_185_088))
    # When these were measured SwiGLU kept both of its factors, and logprobs a part of the logits in float32.
    then = 2 * 3072 // layout.get("tensor_parallel_size", 1) * 28 * memory.tokens * 2 + 3 * 4 * (1 << 26)
    assert (memory.total + then) / GIB == pytest.approx(measured_gib, rel=0.03)


@pytest.mark.parametrize(
    ("layers", "tokens", "layout", "measured_gib"),
    [
        (18, 16384, {}, 44.54),
        (36, 16384, {}, 79.24),
        (36, 16384, {"tensor_parallel_size": 2}, 45.29),
        # 22,227 tokens in two batches, both of which the first stage holds
        (36, 22227 // 2, {"pipeline_parallel_size": 2}, 49.46),
    ],
)
def test_peaks_of_4_billion_parameters_are_predicted(
    layers: int, tokens: int, layout: dict[str, int], measured_gib: float
) -> None:
    shape = Qwen3Config(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    )
    base = Parameters(388_958_720 + layers * 100_930_816)
    memory = of_rank(megatron(micro_batch_tokens=tokens, **layout), shape, base, Parameters(layers * 1_589_248))
    assert memory.total / GIB == pytest.approx(measured_gib, rel=0.05)


def test_a_pipeline_is_as_large_as_its_larger_end() -> None:
    whole = of_rank(megatron(), SHAPE)
    halves = of_rank(megatron(pipeline_parallel_size=2), SHAPE)
    assert (halves.activations, halves.logits) == (whole.activations, 0)  # the first stage holds both batches
    short = of_rank(megatron(pipeline_parallel_size=2, recompute="full"), SHAPE)
    alone = of_rank(megatron(recompute="full"), SHAPE)
    assert (short.activations, short.logits) == (alone.activations // 2, alone.logits)


def test_parts_by_hand() -> None:
    memory = of_rank(megatron(micro_batch_tokens=2048), SHAPE, Parameters(596_049_920), Parameters(1000))
    assert memory.tokens == 2048
    assert memory.weights == 2 * 596_049_920
    assert memory.trained == 18 * 1000
    assert memory.activations == 2 * 2048 * 28 * (4 * 1024 + 4 * 2048 + 3 * 1024 + 3 * 3072 + 4 * 3)
    assert memory.logits == 2 * 2 * 2048 * 151936


def test_a_sequence_longer_than_the_budget_is_a_micro_batch_of_its_own() -> None:
    memory = of_rank(megatron(micro_batch_tokens=100), SHAPE)
    assert memory.tokens == 512 + 1024


def test_recomputation_keeps_the_inputs_of_layers_and_one_layer() -> None:
    memory = of_rank(megatron(recompute="full"), SHAPE)
    layer = 4 * 1024 + 4 * 2048 + 3 * 1024 + 3 * 3072 + 4 * 3
    assert memory.activations == 2 * 8192 * (28 * 1024 + layer)


def test_experts_are_split_by_their_own_ranks() -> None:
    layout = {"tensor_parallel_size": 2, "sequence_parallel": True, "data_parallel_size": 2, "expert_parallel_size": 4}
    memory = of_rank(megatron(**layout), EXPERTS, Parameters(100_000_000, 800_000), Parameters(2000, 4000))
    assert memory.weights == 2 * (100_000_000 // 2 + 800_000 // 4)
    assert memory.trained == 18 * (2000 // 2 + 4000 // 4)
    alike = 4 * 96 + 3 * (96 + 4 * 40 + 2 * 3) + 2 * 3  # norms, three experts a token, attention's adapters
    split = 4 * 128 + 3 * 64
    assert memory.activations == 2 * 8192 * 5 * (alike // 2 + split // 2)


def test_fused_modules_share_one_half_of_their_adapters_in_megatron_only() -> None:
    experts = {
        f"model.layers.0.mlp.experts.{n}.{leaf}": (96, 40) for n in range(2) for leaf in ("gate_proj", "up_proj")
    }
    adapted = {"model.layers.0.self_attn.q_proj": (96, 128), "model.layers.0.self_attn.k_proj": (96, 64)} | experts
    assert adapter_parameters(megatron(), adapted) == Parameters(3 * (96 + 128 + 64), 3 * 2 * (96 + 40 + 40))
    separate = Parameters(3 * (96 + 128 + 96 + 64), 3 * 2 * 2 * (96 + 40))
    assert adapter_parameters(fsdp(), adapted) == separate


def test_fsdp_shards_all_but_embeddings_and_two_layers() -> None:
    layers, embeddings = 28 * 1000, 2 * 151936 * 1024
    memory = of_rank(fsdp(num_processes=2), SHAPE, Parameters(layers + embeddings), Parameters(1000))
    assert memory.weights == 2 * ((layers + embeddings) // 2 + embeddings + 2 * 1000)
    assert memory.trained == 1000 // 2 * 16


def test_fsdp_logits_are_of_completions_only() -> None:
    memory = of_rank(fsdp(), SHAPE)
    assert memory.logits == 2 * 2 * (8192 * 1025 // 1536) * 151936


def test_delta_nets_on_kernels() -> None:
    hybrid = Qwen3NextConfig(
        hidden_size=96, num_hidden_layers=1, layer_types=["linear_attention"], num_experts=0, intermediate_size=160
    )
    keys, values, heads = 16 * 128, 32 * 128, 32  # the family's own numbers of heads
    (kept,) = kept_by_megatron(hybrid, rank=0, wide=2, ranks=1, delta_kernels=True)
    assert kept == (2 * 96 + 2 * 2 * 96, 4 * keys + 5 * values + 2 * values + 64 * heads + 3 * 160)


def test_what_cannot_be_told_is_not() -> None:
    assert trainer_memory(fsdp(), GPT2Config(), base=ONE, trained=ONE) is None
    assert trainer_memory(fsdp(), EXPERTS, base=ONE, trained=ONE) is None
    whole = run_config("unused", lora={"rank": 0}, model={"dtype": "bfloat16"}, sync={"mode": "merge"})
    assert trainer_memory(whole, SHAPE, base=ONE, trained=ONE) is None
