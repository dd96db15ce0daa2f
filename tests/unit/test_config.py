from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest
from pydantic import ValidationError

from relax_pipeline.config import RunConfig, expand_target_modules

MINIMAL: dict[str, Any] = {
    "run_name": "a",
    "steps": 3,
    "model": {"path": "m"},
    "data": {"train": {"path": "p.jsonl"}},
    "sync": {"mode": "adapter"},
}
EXPERT_PARALLEL = {
    "kind": "megatron",
    "data_parallel_size": 4,
    "expert_parallel_size": 2,
    "expert_tensor_parallel_size": 2,
}


def make(**changes: Any) -> RunConfig:
    return RunConfig.model_validate(MINIMAL | changes)


@pytest.mark.parametrize("module", ["relax_pipeline.config", "relax_pipeline.errors", "relax_pipeline.types"])
def test_loads_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_minimal_run_has_no_warnings_and_the_documented_defaults() -> None:
    config = make()
    assert (config.lora.rank, config.lora.alpha, config.lora.dropout) == (32, 32, 0)
    assert (config.algorithm.advantage, config.algorithm.loss, config.algorithm.aggregation) == (
        "group",
        "clip",
        "token",
    )
    assert (config.algorithm.clip_low, config.algorithm.clip_high, config.algorithm.kl_coef) == (0.2, 0.28, 0)
    assert (config.algorithm.importance_sampling, config.algorithm.importance_cap) == ("token_truncate", 2)
    assert (config.optimizer.learning_rate, config.optimizer.beta2, config.optimizer.weight_decay) == (2e-5, 0.98, 0)
    assert (config.trainer.kind, config.engine.kind, config.sync.verify) == ("fsdp", "hf", True)
    assert config.saves_lora_only


def test_resolved_config_reads_back_equal() -> None:
    config = make(engine={"kind": "sglang", "replicas": 2}, lora={"rank": 8, "target_modules": ["linear_qkv"]})
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        make().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "key", "remedy"),
    [
        ({"run_name": "../x"}, "run_name", "start with a letter or digit"),
        ({"run_name": ""}, "run_name", "start with a letter or digit"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"steps": 0}, "steps", "greater than or equal to 1"),
        ({"lora": {"rank": -1}}, "lora.rank", "greater than or equal to 0"),
        ({"lora": {"alpha": 0}}, "lora.alpha", "greater than 0"),
        ({"lora": {"dropout": 1}}, "lora.dropout", "less than 1"),
        ({"lora": {"target_modules": ["q_proj"]}}, "lora.target_modules", "known Megatron names: linear_qkv"),
        ({"lora": {"target_modules": []}}, "lora.target_modules", "set lora.rank to 0 to train all weights"),
        ({"model": {"path": "m", "dtype": "float16"}}, "model.dtype", "'float32' or 'bfloat16'"),
        ({"sync": {"mode": "disk"}}, "sync.mode", "'adapter' or 'merge'"),
        ({"sync": {"mode": "adapter", "buffer_bytes": 1}}, "sync.buffer_bytes", "greater than or equal to 1048576"),
        ({"rewards": {"scorers": []}}, "rewards.scorers", "name at least one, e.g. {kind: math}"),
        ({"rewards": {"scorers": [{"kind": "python:f"}]}}, "rewards.scorers.0.kind", "write python:module.function"),
        ({"algorithm": {"loss": "cispo", "dual_clip": 3}}, "algorithm", "remove it or change the loss"),
        (
            {"data": {"train": {"path": "p"}, "system_prompt": "x", "chat_template": False}},
            "data",
            "system_prompt needs chat_template: set it to true",
        ),
        ({"publish": {"destination": "/tmp/x"}}, "publish.destination", "write file:///folder or s3://bucket/prefix"),
        ({"publish": {"enabled": True}}, "", "publish.enabled needs publish.destination"),
        ({"lora": {"rank": 0}}, "", "set lora.rank above 0, or sync.mode to merge"),
        (
            {"lora": {"target_modules": ["router"]}, "sync": {"mode": "merge"}},
            "",
            "set sync.mode to adapter, or remove router",
        ),
        (
            {"engine": {"kind": "sglang", "data_parallel_size": 2}},
            "",
            "engine.data_parallel_size is 2: an adapter would reach one replica only; set it to 1 and raise",
        ),
        (
            {
                "trainer": EXPERT_PARALLEL,
                "sync": {"mode": "merge"},
            },
            "",
            "trainer.expert_tensor_parallel_size is 2: merge mode folds whole experts; set it to 1",
        ),
        (
            {"trainer": {"kind": "megatron", "sequence_parallel": True}},
            "trainer.megatron",
            "sequence_parallel needs tensor_parallel_size above 1",
        ),
        (
            {"trainer": {"kind": "megatron", "virtual_pipeline_parallel_size": 2}},
            "trainer.megatron",
            "virtual_pipeline_parallel_size 2 needs pipeline_parallel_size above 1",
        ),
        (
            {"trainer": {"kind": "megatron", "context_parallel_size": 2, "transformer_engine": "auto"}},
            "trainer.megatron",
            "context_parallel_size 2 works with torch's own kernels only: set transformer_engine to off",
        ),
        (
            {"trainer": EXPERT_PARALLEL | {"data_parallel_size": 6}},
            "trainer.megatron",
            "expert_parallel_size x expert_tensor_parallel_size is 4 and does not divide the 6 ranks of a pipeline",
        ),
        (
            {"rollout": {"prompts_per_step": 6}, "algorithm": {"updates_per_rollout": 4}},
            "",
            "rollout.prompts_per_step 6 does not divide into algorithm.updates_per_rollout 4",
        ),
        ({"rollout": {"completions_per_prompt": 1}}, "", "raise it, or use reinforce_plus_plus"),
        (
            {"rewards": {"overlong": {"mode": "penalty", "buffer_tokens": 9}}, "rollout": {"max_new_tokens": 8}},
            "",
            "rewards.overlong.buffer_tokens 9 exceeds rollout.max_new_tokens 8",
        ),
        (
            {"algorithm": {"kl_kind": "k1", "kl_coef": 0.1}},
            "",
            "algorithm.kl_kind 'k1' has an expected gradient of zero",
        ),
        (
            {
                "cluster": {"colocate": True},
                "trainer": {"kind": "megatron", "tensor_parallel_size": 2},
                "engine": {"kind": "sglang", "replicas": 3},
            },
            "",
            "the engines need 3 GPUs and the trainer has 2, so adapters would not reach all engines: lower",
        ),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], key: str, remedy: str) -> None:
    with pytest.raises(ValidationError) as caught:
        make(**changes)
    [problem] = caught.value.errors()
    assert ".".join(str(part) for part in problem["loc"]) == key
    assert remedy in problem["msg"]


@pytest.mark.parametrize(
    "changes",
    [
        {"lora": {"rank": 0}, "sync": {"mode": "merge"}},
        {"lora": {"target_modules": ["router"]}},
        {"engine": {"kind": "vllm", "data_parallel_size": 2}, "sync": {"mode": "merge"}},
        {"trainer": EXPERT_PARALLEL},
        {"trainer": EXPERT_PARALLEL | {"expert_parallel_size": 1}, "sync": {"mode": "merge"}},
        {"rollout": {"completions_per_prompt": 1}, "algorithm": {"advantage": "reinforce_plus_plus"}},
        {"rewards": {"overlong": {"mode": "filter", "buffer_tokens": 9}}, "rollout": {"max_new_tokens": 8}},
        {"rewards": {"overlong": {"mode": "penalty", "buffer_tokens": 8}}, "rollout": {"max_new_tokens": 8}},
        {"algorithm": {"kl_kind": "k1"}},
        {"algorithm": {"kl_kind": "k2", "kl_coef": 0.1}},
        {"algorithm": {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}},
        {"lora": {"rank": 8, "alpha": 32}},
        {"optimizer": {"learning_rate": 2e-6}},
        {"lora": {"rank": 0}, "sync": {"mode": "merge"}, "optimizer": {"learning_rate": 1e-6}},
        {"lora": {"rank": 0, "alpha": 400}, "sync": {"mode": "merge"}},
        {"lora": {"rank": 0}, "sync": {}},
        {
            "cluster": {"colocate": True},
            "trainer": {"kind": "megatron", "data_parallel_size": 2},
            "engine": {"kind": "sglang", "replicas": 2},
        },
        {"cluster": {"colocate": True}, "engine": {"kind": "sglang", "replicas": 2}, "sync": {"mode": "merge"}},
        {"engine": {"kind": "sglang", "replicas": 2}},
    ],
)
def test_settings_next_to_the_wrong_ones_pass_without_warning(changes: dict[str, Any]) -> None:
    make(**changes)


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"sync": {}}, "sync.mode is not set: merge sends the whole model each step, adapter mode only the adapters"),
        ({"lora": {"rank": 8, "alpha": 33}}, "lora.alpha / lora.rank is 4.125; above 4 training tends to be unstable"),
        ({"optimizer": {"learning_rate": 1.9e-6}}, "optimizer.learning_rate 1.9e-06 is a rate for full fine-tuning"),
        ({"rollout": {"top_p": 0.9}}, "train with top_p 1 and top_k 0"),
        ({"rollout": {"top_k": 5}}, "train with top_p 1 and top_k 0"),
        ({"algorithm": {"loss": "gspo"}}, "the gspo paper uses 3e-4 and 4e-4"),
        ({"algorithm": {"loss": "gspo", "clip_low": 1e-3, "clip_high": 0.1}}, "the gspo paper uses 3e-4 and 4e-4"),
    ],
)
def test_doubtful_settings_warn_once(changes: dict[str, Any], advice: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(**changes)
    [warning] = caught
    assert advice in str(warning.message)


def test_no_sync_mode_is_merge() -> None:
    with pytest.warns(UserWarning, match=r"sync\.mode is not set"):
        assert make(sync={}).sync.mode == "merge"


def test_target_modules_expand_in_first_seen_order_without_repeats() -> None:
    assert expand_target_modules(("linear_fc1", "linear_q", "linear_qkv")) == (
        "gate_proj",
        "up_proj",
        "q_proj",
        "k_proj",
        "v_proj",
    )


def test_full_training_never_saves_lora_only() -> None:
    assert not make(lora={"rank": 0}, sync={"mode": "merge"}).saves_lora_only


def test_saves_every_nth_step_and_the_last() -> None:
    config = make(steps=7, checkpoint={"every": 3})
    assert [step for step in range(1, 8) if config.saves_at(step)] == [3, 6, 7]


@pytest.mark.parametrize(("every", "steps"), [(3, [3, 6, 7]), (0, [7])])
def test_evaluates_every_nth_step_and_the_last(every: int, steps: list[int]) -> None:
    config = make(steps=7, evaluation={"source": {"path": "h.jsonl"}, "every": every})
    assert [step for step in range(1, 8) if config.evaluates_at(step)] == steps


def test_without_held_out_prompts_nothing_is_evaluated() -> None:
    assert not make(steps=7).evaluates_at(7)
