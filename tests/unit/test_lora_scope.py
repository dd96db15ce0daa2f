from __future__ import annotations

import pytest

from relax_pipeline.config import LoraConfig
from relax_pipeline.errors import ConfigError
from relax_pipeline.lora.scope import in_vision_region, resolve_targets

LINEARS = (
    "model.visual.blocks.0.q_proj",
    "model.visual.merger.down_proj",
    "model.layers.1.self_attn.q_proj",
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.self_attn.k_proj",
    "model.layers.0.self_attn.v_proj",
    "model.layers.0.mlp.down_proj",
    "lm_head",
)


def lora(scope: str, *targets: str) -> LoraConfig:
    return LoraConfig.model_validate({"scope": scope, "target_modules": targets})


def test_scope_all_takes_both_regions_in_model_order() -> None:
    assert resolve_targets(LINEARS, lora("all", "linear_q", "linear_fc2")) == (
        "model.visual.blocks.0.q_proj",
        "model.visual.merger.down_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.down_proj",
    )


def test_scope_language_leaves_vision_out() -> None:
    assert resolve_targets(LINEARS, lora("language", "linear_fc2")) == ("model.layers.0.mlp.down_proj",)


def test_scope_vision_leaves_language_out() -> None:
    assert resolve_targets(LINEARS, lora("vision", "linear_q")) == ("model.visual.blocks.0.q_proj",)


def test_fused_target_expands_to_what_the_model_has() -> None:
    assert resolve_targets(LINEARS, lora("language", "linear_qkv")) == LINEARS[2:6]


@pytest.mark.parametrize(
    ("scope", "target", "message"),
    [
        ("all", "linear_fc1", r"'linear_fc1' \(gate_proj, up_proj\) matches no linear module in scope 'all'"),
        ("vision", "linear_k", r"the model has down_proj, q_proj$"),
    ],
)
def test_target_without_a_module_says_what_there_is(scope: str, target: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_targets(LINEARS, lora(scope, "linear_q", target))


def test_scope_without_modules_says_so() -> None:
    with pytest.raises(ConfigError, match="in scope 'vision'; the model has none there"):
        resolve_targets(LINEARS[2:], lora("vision", "linear_q"))


@pytest.mark.parametrize(
    ("module", "vision"),
    [
        ("model.visual.blocks.0.q_proj", True),
        ("audio_tower.layers.0.q_proj", True),
        ("model.visualizer.q_proj", False),
        ("model.layers.0.audio_proj", False),
    ],
)
def test_regions_are_whole_path_segments(module: str, vision: bool) -> None:
    assert in_vision_region(module) is vision
