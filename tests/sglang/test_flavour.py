"""Adapters of gated delta nets in SGLang's modules, tensor by tensor. No server runs here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from relax_pipeline.errors import EngineError
from relax_pipeline.lora.adapter import make_adapter
from relax_pipeline.rollout.sglang.checks import check_adapter
from relax_pipeline.rollout.sglang.flavour import in_sglang_flavour, sglang_leaves
from relax_pipeline.rollout.sglang.launch import LoraRoom
from relax_pipeline.types import Adapter, AdapterSpec

NET = "model.layers.0.linear_attn."
ROWS = {"in_proj_a": 2, "in_proj_b": 2, "in_proj_qkv": 5, "in_proj_z": 3, "out_proj": 4}
LEAVES = tuple(ROWS)
LINEARS = {NET + leaf: (rows, 6 if leaf == "out_proj" else 7) for leaf, rows in ROWS.items()}
"""(out, in)."""
ROOM = LoraRoom(rank=2, leaf_modules=LEAVES, versions=2)


def key(leaf: str, half: str) -> str:
    return f"base_model.model.{NET}{leaf}.lora_{half}.weight"


def delta_adapter(**changes: torch.Tensor) -> Adapter:
    """Rank 2, one lora_A [2, 7] for all of in_proj, gates at zero; a change is named by leaf and half."""
    shared_RI = torch.arange(14.0).view(2, 7)
    tensors = {key(leaf, "A"): shared_RI.clone() for leaf in LEAVES if leaf != "out_proj"}
    tensors |= {
        key("in_proj_qkv", "B"): torch.arange(10.0).view(5, 2),
        key("in_proj_z", "B"): torch.arange(-6.0, 0).view(3, 2),
        key("in_proj_b", "B"): torch.zeros(2, 2),
        key("in_proj_a", "B"): torch.zeros(2, 2),
        key("out_proj", "A"): torch.arange(12.0).view(2, 6),
        key("out_proj", "B"): torch.arange(8.0).view(4, 2),
    }
    tensors |= {key(name[:-2], name[-1]): tensor for name, tensor in changes.items()}
    return make_adapter(tensors, spec=AdapterSpec(2, 4.0, LEAVES), version=3)


def test_qkv_and_z_become_one_and_gates_are_left_out() -> None:
    given = delta_adapter()
    sent = in_sglang_flavour(given)
    rows = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [-6, -5], [-4, -3], [-2, -1]]
    expected = {
        key("in_proj_qkvz", "A"): torch.arange(14.0).view(2, 7),
        key("in_proj_qkvz", "B"): torch.tensor(rows, dtype=torch.float32),
        key("out_proj", "A"): torch.arange(12.0).view(2, 6),
        key("out_proj", "B"): torch.arange(8.0).view(4, 2),
    }
    assert sent.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(sent.tensors[name], tensor, rtol=0, atol=0)
    assert sent.spec.target_modules == ("in_proj_qkvz", "out_proj")
    assert sent.info == given.info


def test_what_was_given_is_left_as_it_was() -> None:
    given = delta_adapter()
    in_sglang_flavour(given)
    assert len(given.tensors) == 10


def test_adapter_without_delta_nets_is_not_touched() -> None:
    given = delta_adapter()
    tensors = {name: tensor for name, tensor in given.tensors.items() if "out_proj" in name}
    plain = make_adapter(tensors, spec=replace(given.spec, target_modules=("out_proj",)), version=3)
    assert in_sglang_flavour(plain) is plain


@pytest.mark.parametrize("leaf", ["in_proj_b", "in_proj_a"])
def test_adapted_gate_is_refused(leaf: str) -> None:
    smallest = torch.tensor([[0, 0], [0, 1e-45]])
    with pytest.raises(EngineError, match=rf"version 3: {NET}{leaf} has a lora_B that is not zero.*sync.mode to merge"):
        in_sglang_flavour(delta_adapter(**{f"{leaf}_B": smallest}))


@pytest.mark.parametrize(
    "lora_A",
    [torch.arange(14.0).view(2, 7).nextafter(torch.tensor(99.0)), torch.arange(14.0).view(2, 7).bfloat16()],
    ids=["one bit", "dtype"],
)
def test_parts_that_do_not_share_one_input_matrix_are_refused(lora_A: torch.Tensor) -> None:
    with pytest.raises(EngineError, match=f"version 3: the lora_A of {NET}in_proj_qkv is not that of in_proj_z"):
        in_sglang_flavour(delta_adapter(in_proj_z_A=lora_A))


def test_leaves_of_the_command_line() -> None:
    assert sglang_leaves(("in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z", "out_proj", "q_proj")) == (
        "in_proj_qkvz",
        "out_proj",
        "q_proj",
    )


def test_adapter_on_a_delta_net_passes_the_checks() -> None:
    check_adapter(delta_adapter(), room=ROOM, linears=LINEARS)


@pytest.mark.parametrize(
    ("leaf", "companion"),
    [
        ("in_proj_qkv", "in_proj_z"),
        ("in_proj_z", "in_proj_qkv"),
        ("in_proj_b", "in_proj_qkv"),
        ("in_proj_a", "in_proj_qkv"),
    ],
)
def test_part_of_in_proj_alone_is_refused(leaf: str, companion: str) -> None:
    given = delta_adapter()
    alone: dict[str, Any] = {name: tensor for name, tensor in given.tensors.items() if f".{leaf}." in name}
    adapter = make_adapter(alone, spec=given.spec, version=3)
    with pytest.raises(EngineError, match=f"hosts {NET}{leaf} only together with {companion}"):
        check_adapter(adapter, room=ROOM, linears=LINEARS)
