from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_run import run_config

from relax_pipeline.config import RunConfig
from relax_pipeline.errors import ConfigError
from relax_pipeline.trainer.megatron_limits import check_model

DENSE = {
    "model_type": "qwen3",
    "num_hidden_layers": 6,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}
MOE = DENSE | {"num_experts": 6}
SEEING = {"model_type": "qwen3_vl", "vision_config": {}, "text_config": DENSE}
DELTA = DENSE | {"linear_num_key_heads": 4, "linear_num_value_heads": 8}


def config(trainer: dict[str, Any], lora: dict[str, Any]) -> RunConfig:
    values = run_config(Path("unused"), lora={"rank": 12, "alpha": 12} | lora).model_dump()
    return RunConfig.model_validate(values | {"trainer": {"kind": "megatron"} | trainer})


@pytest.mark.parametrize(
    ("hf_config", "trainer", "lora", "message"),
    [
        (
            DENSE,
            {"tensor_parallel_size": 3},
            {},
            "^trainer.tensor_parallel_size 3 does not divide the model's num_key_value_heads 4: choose another$",
        ),
        (
            DELTA,
            {"tensor_parallel_size": 2, "context_parallel_size": 4},
            {},
            "^trainer.tensor_parallel_size 2 x trainer.context_parallel_size 4 does not divide the model's "
            "linear_num_key_heads 4: choose others$",
        ),
        (DENSE, {"pipeline_parallel_size": 4}, {}, r"^the model's 6 layers do not go into 4 equal pieces: change"),
        (DENSE, {"pipeline_parallel_size": 12}, {}, r"^the model's 6 layers do not go into 12 equal pieces: change"),
        (
            DENSE,
            {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2},
            {},
            "do not go into 4 equal pieces: change",
        ),
        (
            DENSE,
            {"data_parallel_size": 2, "expert_parallel_size": 2},
            {},
            "^trainer.expert_parallel_size is 2 and the model has no experts: set it to 1$",
        ),
        (
            MOE,
            {"data_parallel_size": 4, "expert_parallel_size": 4},
            {},
            "expert_parallel_size 4 does not divide the model's 6 experts",
        ),
        (
            MOE,
            {"data_parallel_size": 2, "expert_tensor_parallel_size": 2},
            {},
            "computes adapters on split experts wrongly; set it to 1",
        ),
        (MOE, {"tensor_parallel_size": 2}, {}, "needs trainer.sequence_parallel: true$"),
        (DENSE, {"tensor_parallel_size": 4}, {"rank": 6}, "4 does not divide lora.rank 6: Megatron splits adapters"),
        (
            DENSE,
            {},
            {"target_modules": ["linear_q"]},
            r"^lora.target_modules \['linear_q'\]: the Megatron trainer adapts",
        ),
        (DENSE, {}, {"target_modules": ["router"]}, "'router' and the model has no experts: remove it$"),
        (
            MOE,
            {"tensor_parallel_size": 2, "sequence_parallel": True},
            {"target_modules": ["router"]},
            "computes wrongly under trainer.sequence_parallel: remove it",
        ),
        (SEEING | {"model_type": "gemma3"}, {}, {}, "on text, and not gemma3: set trainer.kind to fsdp$"),
        (
            SEEING | {"text_config": DENSE | {"rope_scaling": {"type": "yarn"}}},
            {},
            {},
            "drops the 'yarn' rotary scaling of a model that sees: set trainer.kind to fsdp$",
        ),
        (SEEING, {"tensor_parallel_size": 3}, {}, "does not divide the model's num_key_value_heads 4: choose another$"),
        (DENSE | {"kv_lora_rank": 8}, {}, {}, "has no multi-latent attention so far"),
        (DENSE | {"sliding_window": 8}, {}, {}, "has no sliding-window attention so far"),
        (DENSE | {"model_type": "qwen3_next"}, {}, {}, "exports qwen3_next's in_proj in the wrong shape"),
    ],
)
def test_what_megatron_cannot_do_is_told_before_a_start(
    hf_config: dict[str, Any], trainer: dict[str, Any], lora: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_model(config(trainer, lora), hf_config)


@pytest.mark.parametrize(
    "sections", [{"lora": {"rank": 0}, "sync": {"mode": "merge"}}, {"checkpoint": {"save_lora_only": False}}]
)
def test_a_mixture_whose_experts_would_have_to_be_saved_is_told_before_a_start(sections: dict[str, Any]) -> None:
    whole = run_config(Path("unused"), trainer={"kind": "megatron"}, **sections)
    with pytest.raises(ConfigError, match="hold adapters of experts and no experts: set "):
        check_model(whole, MOE)
    check_model(whole, DENSE)


@pytest.mark.parametrize(
    ("hf_config", "trainer", "lora"),
    [
        (DENSE, {"tensor_parallel_size": 4, "sequence_parallel": True}, {}),
        (DENSE, {"pipeline_parallel_size": 3, "virtual_pipeline_parallel_size": 2}, {}),
        (DENSE | {"sliding_window": 8, "use_sliding_window": False}, {}, {}),
        (MOE, {"data_parallel_size": 3, "expert_parallel_size": 3}, {"target_modules": ["router"]}),
        (MOE, {"tensor_parallel_size": 2, "sequence_parallel": True, "expert_parallel_size": 2}, {}),
        (DENSE, {"tensor_parallel_size": 4}, {"rank": 0}),
        (DENSE, {"tensor_parallel_size": 4, "context_parallel_size": 5}, {}),
        (DELTA, {"tensor_parallel_size": 2, "context_parallel_size": 2}, {}),
        (SEEING, {"tensor_parallel_size": 4, "context_parallel_size": 2}, {}),
        (SEEING | DENSE | {"model_type": "qwen2_5_vl", "rope_scaling": {"type": "mrope"}, "text_config": None}, {}, {}),
        (MOE, {"context_parallel_size": 3, "expert_parallel_size": 3}, {}),
    ],
)
def test_layouts_next_to_the_wrong_ones_pass(
    hf_config: dict[str, Any], trainer: dict[str, Any], lora: dict[str, Any]
) -> None:
    sync = {} if lora.get("rank", 1) else {"sync": {"mode": "merge"}}
    values = run_config(Path("unused"), lora={"rank": 12, "alpha": 12} | lora, **sync).model_dump()
    check_model(RunConfig.model_validate(values | {"trainer": {"kind": "megatron"} | trainer}), hf_config)


def test_all_reasons_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match="num_key_value_heads 4: choose another; the model's 6 layers"):
        check_model(config({"tensor_parallel_size": 3, "pipeline_parallel_size": 4}, {}), DENSE)


def test_other_trainers_have_no_such_limits() -> None:
    check_model(run_config(Path("unused")), MOE | {"vision_config": {}})
