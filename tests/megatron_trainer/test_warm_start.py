"""An adapter that was exported under one layout of ranks is where training starts under another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron_models import megatron_config
from rank_group import rank_group
from safetensors.torch import load_file, save_file
from tiny_run import train

from relax_pipeline.errors import AdapterError
from relax_pipeline.lora.adapter import WEIGHTS_FILE

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

TENSOR = {"tensor_parallel_size": 2, "sequence_parallel": True}
EXPERTS = TENSOR | {"expert_parallel_size": 2, "pipeline_parallel_size": 2}
DELTA = {"target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj"]}


@pytest.mark.parametrize(
    ("family", "layout", "lora"), [("moe", EXPERTS, {}), ("delta", TENSOR, DELTA)], ids=["moe", "delta"]
)
def test_adapter_arrives_whole_under_another_layout(
    family: str, layout: dict[str, Any], lora: dict[str, Any], folder: Callable[[str], Path], tmp_path: Path
) -> None:
    sections = {"lora": lora, "sync": {"mode": "merge"}}  # gates train as well
    with rank_group(megatron_config(folder(family), **sections), tmp_path) as trainer:
        train(trainer, updates=1)
        trainer.save(tmp_path / "saved")
        expected = trainer.export_adapter().info
    with rank_group(megatron_config(folder(family), trainer=layout, **sections), tmp_path) as trainer:
        trainer.start_from(tmp_path / "saved" / "adapter")
        started = trainer.export_adapter().info
        assert (started.version, started.digest, started.modules) == (0, expected.digest, expected.modules)


def test_adapter_without_one_lora_A_for_fused_modules_is_refused_by_all_ranks(  # noqa: N802 - PEFT's name
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    with rank_group(megatron_config(folder("qwen3"), trainer=TENSOR), tmp_path) as trainer:
        trainer.save(tmp_path / "saved")
        before = trainer.export_adapter().info
        weights = tmp_path / "saved" / "adapter" / WEIGHTS_FILE
        tensors = load_file(weights)
        tensors["base_model.model.model.layers.3.self_attn.v_proj.lora_A.weight"][-1, -1] += 1
        save_file(tensors, str(weights))
        with pytest.raises(
            AdapterError, match=r"layers.3.self_attn.v_proj.lora_A.weight is not that of .* trainer.kind fsdp"
        ):
            trainer.start_from(tmp_path / "saved" / "adapter")
        assert trainer.export_adapter().info == before
