"""What gets an adapter, decided by all ranks together, and what of it trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron_models import megatron_config
from rank_group import rank_group
from tiny_run import train

from relax_pipeline.errors import ConfigError, ModelError, TrainerError

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

PIPELINE = {"pipeline_parallel_size": 2}
TENSOR = {"tensor_parallel_size": 2, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (
            {"target_modules": ["linear_qkv", "out_proj"]},
            r"^lora.target_modules: 'out_proj' \(out_proj\) matches no linear module in scope 'all'; the model has "
            "linear_fc1, linear_fc2, linear_proj, linear_qkv$",
        ),
        ({"scope": "vision"}, "in scope 'vision'; the model has none there$"),
    ],
)
def test_a_target_without_modules_stops_all_ranks(
    lora: dict[str, Any], message: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    config = megatron_config(folder("qwen3"), lora=lora, trainer=PIPELINE)
    with pytest.raises(ConfigError, match=message), rank_group(config, tmp_path):
        pass


def test_a_stage_without_the_target_has_no_adapter_and_trains_along(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    # Layers 0 and 2 are delta nets, 1 and 3 attention: with four stages, two have no linear_qkv.
    config = megatron_config(
        folder("delta"), lora={"target_modules": ["linear_qkv"]}, trainer={"pipeline_parallel_size": 4}
    )
    with rank_group(config, tmp_path) as trainer:
        metrics = train(trainer, updates=2)
        modules = {f"model.layers.{layer}.self_attn.{leaf}_proj" for layer in (1, 3) for leaf in "qkv"}
        assert set(trainer.info().modules) == modules
        trainer.save(tmp_path / "checkpoint")
        assert set(trainer.adapter_norms()) == {"q_proj", "k_proj", "v_proj"}
    assert metrics[0]["grad_norm"] > 0


def test_limits_are_told_by_all_ranks_too(folder: Callable[[str], Path], tmp_path: Path) -> None:
    config = megatron_config(folder("qwen3"), lora={"rank": 3}, trainer=TENSOR)
    with pytest.raises(ConfigError, match=r"does not divide lora\.rank 3"), rank_group(config, tmp_path):
        pass


@pytest.mark.parametrize("family", ["missing", "unknown"])
def test_a_folder_without_a_model_for_megatron_is_told(family: str, tmp_path: Path) -> None:
    if family == "unknown":
        (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    message = "is no Hugging Face checkpoint" if family == "missing" else "is nothing Megatron-Bridge can load"
    with pytest.raises(ModelError, match=message), rank_group(megatron_config(tmp_path), tmp_path):
        pass


@pytest.mark.parametrize(("mode", "trains"), [("adapter", False), ("merge", True)])
def test_gates_of_delta_nets_train_only_where_engines_get_merged_weights(
    mode: str, trains: bool, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    config = megatron_config(
        folder("delta"),
        lora={"target_modules": ["in_proj"]},
        sync={"mode": mode},
        trainer=TENSOR,
        optimizer={"weight_decay": 0.1},
    )
    with rank_group(config, tmp_path) as trainer:
        train(trainer, updates=2)
        tensors = trainer.export_adapter().content.tensors
    moved = {
        leaf: {bool(lora_B.any()) for name, lora_B in tensors.items() if f".{leaf}.lora_B." in name}
        for leaf in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    }
    assert moved == {"in_proj_qkv": {True}, "in_proj_z": {True}, "in_proj_b": {trains}, "in_proj_a": {trains}}


def test_gates_that_merge_mode_has_trained_are_not_exported_in_adapter_mode(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    lora = {"target_modules": ["in_proj"]}
    with rank_group(megatron_config(folder("delta"), lora=lora, sync={"mode": "merge"}), tmp_path) as trainer:
        train(trainer, updates=1)
        trainer.save(tmp_path / "checkpoint")
    config = megatron_config(folder("delta"), lora=lora, sync={"mode": "adapter"}, trainer=PIPELINE)
    with rank_group(config, tmp_path) as trainer:
        trainer.load(tmp_path / "checkpoint")
        with pytest.raises(TrainerError, match=r"4 gates is not zero, e\.g\. .*\.in_proj_a, .* sync.mode to merge"):
            trainer.export_adapter()
        assert trainer.policy_version() == 1
