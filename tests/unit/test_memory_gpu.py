from __future__ import annotations

from typing import Any

import pytest
from tiny_run import run_config
from transformers import Qwen3Config, Qwen3NextConfig

from relax_pipeline.config import RunConfig
from relax_pipeline.errors import ConfigError
from relax_pipeline.memory import TrainerMemory
from relax_pipeline.memory_gpu import EngineMemory, cache_bytes_per_token, check_room, engine_memory, sent_bytes

SHAPE = Qwen3Config(hidden_size=96, num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=4, head_dim=16)
TRAINER = TrainerMemory(tokens=8192, weights=300, trained=40, activations=900, logits=60)
ENGINE = EngineMemory(weights=300, adapters=50, cache_of_token=1, completions=1, cache=1)


def configured(*, colocate: bool = True, **engine: Any) -> RunConfig:
    return run_config(
        "unused",
        model={"path": "unused", "dtype": "bfloat16"},
        data={"train": {"path": "unused"}, "max_prompt_tokens": 100},
        rollout={"prompts_per_step": 6, "completions_per_prompt": 7, "max_new_tokens": 200},
        cluster={"colocate": colocate},
        sync={"mode": "adapter", "transport": "ipc"},
        engine={"kind": "sglang", **engine},
    )


def test_an_engine_by_hand() -> None:
    config = configured(colocate=False, replicas=2, tensor_parallel_size=2)
    memory = engine_memory(config, SHAPE, model_bytes=1000, adapter_bytes=10)
    of_token = 2 * 5 * 4 * 16 * 2 // 2
    assert memory == EngineMemory(
        weights=500, adapters=4 * 10 // 2, cache_of_token=of_token, completions=21, cache=of_token * 21 * 300
    )


def test_no_more_completions_run_than_the_server_takes() -> None:
    memory = engine_memory(configured(max_running_requests=11), SHAPE, model_bytes=1, adapter_bytes=1)
    assert memory is not None
    assert memory.completions == 11


def test_delta_nets_cache_nothing_a_token() -> None:
    layers = ["linear_attention", "linear_attention", "full_attention"]
    hybrid = Qwen3NextConfig(num_hidden_layers=3, layer_types=layers, num_key_value_heads=2, head_dim=64)
    assert cache_bytes_per_token(configured(), hybrid) == 2 * 1 * 2 * 64 * 2


@pytest.mark.parametrize(("gpu_bytes", "expected"), [(None, 30), (160, 20)])
def test_versions_that_were_sent_stay_on_an_eighth_of_the_gpu(gpu_bytes: int | None, expected: int) -> None:
    assert sent_bytes(configured(), model_bytes=1000, adapter_bytes=10, gpu_bytes=gpu_bytes) == expected


def test_between_gpus_ipc_keeps_nothing_there() -> None:
    assert sent_bytes(configured(colocate=False), model_bytes=1000, adapter_bytes=10, gpu_bytes=None) == 0


@pytest.mark.parametrize(
    ("offload", "gpu_bytes", "warns"),
    [("all", 1300, False), ("all", 1299, True), ("kv_cache", 1650, False), ("kv_cache", 1649, True)],
)
def test_what_stays_of_an_engine_counts(offload: str, gpu_bytes: int, *, warns: bool) -> None:
    config = configured(offload=offload, memory_fraction=0.6)
    note = check_room(config, TRAINER, ENGINE, sent=0, gpu_bytes=gpu_bytes)
    assert bool(note and "trainer.micro_batch_tokens (8,192 a rank)" in note) == warns


def test_what_never_fits_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"340 B before the first token: spread the model over more ranks"):
        check_room(configured(colocate=False), TRAINER, None, sent=0, gpu_bytes=339)


@pytest.mark.parametrize("offload", ["none", "kv_cache", "all"])
def test_an_engine_that_generates_needs_room_beside_the_trainer(offload: str) -> None:
    config = configured(memory_fraction=0.7, offload=offload)
    with pytest.raises(
        ConfigError, match=r"350 B of the trainer beside the 700 B .* lower engine\.memory_fraction to 0\.65"
    ):
        check_room(config, TRAINER, ENGINE, sent=10, gpu_bytes=1000)
    fits = configured(memory_fraction=0.65, offload=offload)
    check_room(fits, TRAINER, ENGINE, sent=10, gpu_bytes=1000)
    apart = configured(memory_fraction=0.7, colocate=False)
    check_room(apart, TRAINER, ENGINE, sent=10, gpu_bytes=1000)


def test_an_engine_of_too_small_a_share_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.memory_fraction 0\.3 .* raise it"):
        check_room(configured(memory_fraction=0.3), None, ENGINE, sent=0, gpu_bytes=1000)
