"""What SGLang would serve wrongly without a word, or die from, is refused by name. No server runs here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tiny_sglang import LEAVES, SHAPES, full_adapter, without

from relax_pipeline.errors import EngineError
from relax_pipeline.rollout.sglang.checks import check_adapter, digests_of
from relax_pipeline.rollout.sglang.launch import LoraRoom
from relax_pipeline.types import Adapter

ROOM = LoraRoom(rank=3, leaf_modules=LEAVES, versions=2)
O1 = "base_model.model.model.layers.1.self_attn.o_proj.lora_"
Tensors = dict[str, torch.Tensor]


def check(adapter: Adapter, room: LoraRoom | None = ROOM) -> None:
    check_adapter(adapter, room=room, linears=SHAPES)


def announced(adapter: Adapter, tensors: Tensors) -> Adapter:
    """An adapter that holds these tensors on purpose, rather than having lost the others on its way."""
    modules = tuple(sorted({name.split(".lora_")[0].removeprefix("base_model.model.") for name in tensors}))
    return replace(adapter, tensors=tensors, info=replace(adapter.info, modules=modules))


def test_adapter_on_all_modules_passes() -> None:
    check(full_adapter(1))


def test_adapter_on_one_kind_of_module_passes() -> None:
    item = full_adapter(1)
    check(announced(item, {name: t for name, t in item.tensors.items() if "down_proj" in name}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {}, "holds no tensors; SGLang would serve the bare base"),
        (lambda t: {name.replace(".layers.", ".layer."): v for name, v in t.items()}, "not announced for"),
        (lambda t: without(t, "lora_A"), "has only one of lora_A and lora_B"),
        (lambda t: without(t, "lora_B"), "has only one of lora_A and lora_B"),
        (lambda t: without(t, O1 + "A"), r"lora_A and lora_B for \['model.layers.1.self_attn.o_proj'\]"),
        (lambda t: without(t, O1 + "B"), r"lora_A and lora_B for \['model.layers.1.self_attn.o_proj'\]"),
        (lambda t: without(t, "layers.1.self_attn.k_proj"), r"missing for \['model.layers.1.self_attn.k_proj'\]"),
        (lambda t: without(t, "layers.1."), r"missing for \['model.layers.1.mlp.down_proj'"),
        (lambda t: t | {O1 + "A.weight": torch.ones(3, 32)}, r"o_proj.lora_A.weight is torch.float32 \(3, 32\)"),
        (lambda t: t | {O1 + "A.weight": torch.ones(64, 3)}, r"o_proj.lora_A.weight is torch.float32 \(64, 3\)"),
        (lambda t: t | {O1 + "A.weight": torch.ones(9, 64)}, r"lora_A.weight is torch.float32 \(9, 64\)"),
        (lambda t: t | {O1 + "B.weight": torch.ones(64, 3)}, r"o_proj.lora_B.weight is torch.float32 \(64, 3\)"),
        (lambda t: t | {O1 + "B.weight": torch.ones(32, 2)}, r"o_proj.lora_B.weight .* it must be floats of \(32, 3\)"),
        (lambda t: t | {O1 + "B.weight": torch.ones(32, 3).int()}, "lora_B.weight is torch.int32"),
        (lambda t: t | {O1 + "B.bias": torch.ones(32)}, r"o_proj.lora_B.bias' is no LoRA tensor"),
        (lambda t: t | {"base_model.model.lm_head.weight": torch.ones(80, 32)}, "lm_head.weight' is no LoRA tensor"),
        (lambda t: t | {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(3, 80)}, "is no LoRA"),
        (lambda t: t | {O1.replace("o_proj.lora_", "q_norm.weight"): torch.ones(16)}, "q_norm.weight' is no"),
        (lambda t: {name.replace("base_model.model.", ""): v for name, v in t.items()}, "tensors must be named base_m"),
    ],
)  # fmt: skip
def test_tensors_lost_or_changed_on_the_way(change: Callable[[Tensors], Tensors], message: str) -> None:
    item = full_adapter(1)
    with pytest.raises(EngineError, match=message):
        check(replace(item, tensors=change(item.tensors)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: without(t, "q_proj"), r"hosts model.layers.0.self_attn.k_proj only together with q_proj"),
        (lambda t: without(t, "v_proj"), r"hosts model.layers.0.self_attn.q_proj only together with v_proj"),
        (lambda t: without(t, "gate_proj"), r"hosts model.layers.0.mlp.up_proj only together with gate_proj"),
        (
            lambda t: {name.replace("down_proj", "linear_fc2"): v for name, v in t.items()},
            "no linear module model.layers.0.mlp.linear_fc2 in a decoder layer",
        ),
        (
            lambda t: (
                t | {f"base_model.model.model.layers.0.self_attn.qkv_proj.lora_{h}.weight": torch.ones(1) for h in "AB"}
            ),
            "no linear module model.layers.0.self_attn.qkv_proj in a decoder layer",
        ),
        (
            lambda t: {name.replace("layers.1.", "layers.7."): v for name, v in t.items()},
            "no linear module model.layers.7.mlp.down_proj in a decoder layer",
        ),
        (
            lambda t: t | {f"base_model.model.lm_head.lora_{h}.weight": torch.ones(1) for h in "AB"},
            "no linear module lm_head in a decoder layer",
        ),
    ],
)
def test_modules_that_cannot_be_hosted(change: Callable[[Tensors], Tensors], message: str) -> None:
    item = full_adapter(1)
    with pytest.raises(EngineError, match=message):
        check(announced(item, change(item.tensors)))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"rank": 4}, "has rank 4, the engine was started for ranks from 1 to 3"),
        ({"rank": 2}, r"lora_A.weight is torch.float32 \(3, \d+\), it must be floats of \(2, "),
        ({"alpha": 0.0}, "has alpha 0"),
    ],
)
def test_settings_that_do_not_fit_the_tensors(spec: dict[str, float], message: str) -> None:
    item = full_adapter(1)
    with pytest.raises(EngineError, match=message):
        check(replace(item, spec=replace(item.spec, **spec)))  # type: ignore[arg-type]


def test_module_the_server_has_no_room_for() -> None:
    room = replace(ROOM, leaf_modules=tuple(leaf for leaf in LEAVES if leaf != "down_proj"))
    with pytest.raises(EngineError, match="down_proj is none of the modules the engine was started for"):
        check(full_adapter(1), room)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite(value: float) -> None:
    tensors = full_adapter(1).tensors
    tensors[O1 + "A.weight"][0, 0] = value
    with pytest.raises(EngineError, match=r"version 1: .*layers.1.self_attn.o_proj.lora_A.weight holds NaN"):
        digests_of(tensors, version=1)
