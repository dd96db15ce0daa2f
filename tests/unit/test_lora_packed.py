from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from relax_pipeline.lora.adapter import make_adapter, write_adapter
from relax_pipeline.lora.names import lora_key
from relax_pipeline.lora.norms import delta_norms
from relax_pipeline.lora.packed import leaves, packed_module, packed_shapes, pair, unpacked
from relax_pipeline.types import AdapterSpec

EXPERTS, INSIDE, INTERMEDIATE, RANK = 3, 5, 4, 2
PARENT = "model.layers.1.mlp.experts"
GATE_UP, DOWN, Q = f"{PARENT}.gate_up_proj", f"{PARENT}.down_proj", "model.layers.1.self_attn.q_proj"


def packed() -> dict[str, torch.Tensor]:
    def counted(*shape: int) -> torch.Tensor:
        return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)

    return {
        lora_key(GATE_UP, "A"): counted(EXPERTS, RANK, INSIDE),
        lora_key(GATE_UP, "B"): counted(EXPERTS, 2 * INTERMEDIATE, RANK),
        lora_key(DOWN, "A"): counted(EXPERTS, RANK, INTERMEDIATE),
        lora_key(DOWN, "B"): counted(EXPERTS, INSIDE, RANK),
        lora_key(Q, "A"): counted(RANK, INSIDE),
        lora_key(Q, "B"): counted(INSIDE, RANK),
    }


def test_peft_gets_a_pair_for_each_module_of_each_expert() -> None:
    named = unpacked(packed())
    assert len(named) == 2 * (3 * EXPERTS + 1)
    gate_B, up_B = (named[lora_key(f"{PARENT}.2.{leaf}", "B")] for leaf in ("gate_proj", "up_proj"))
    # Rows of expert 2 begin at 2 * (2 * 4 * 2) = 32; its up_proj four rows of 2 further on.
    assert gate_B.tolist() == [[32, 33], [34, 35], [36, 37], [38, 39]]
    assert up_B.tolist() == [[40, 41], [42, 43], [44, 45], [46, 47]]
    down_A = named[lora_key(f"{PARENT}.1.down_proj", "A")]
    assert down_A.tolist() == [[8, 9, 10, 11], [12, 13, 14, 15]]


def test_a_folder_has_a_pair_for_each_module_of_each_expert(tmp_path: Path) -> None:
    leaf_names = ("down_proj", "gate_proj", "q_proj", "up_proj")
    adapter = make_adapter(packed(), spec=AdapterSpec(RANK, 4.0, leaf_names), version=3)
    write_adapter(adapter, tmp_path, base_model="base", metadata={})
    held, expected = load_file(tmp_path / "adapter_model.safetensors"), unpacked(packed())
    assert held.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(held[name], tensor)


def test_gate_and_up_share_one_first_half() -> None:
    named = unpacked(packed())
    gate_A, up_A = (named[lora_key(f"{PARENT}.1.{leaf}", "A")] for leaf in ("gate_proj", "up_proj"))
    assert gate_A.data_ptr() == up_A.data_ptr()
    assert gate_A[0].tolist() == [10, 11, 12, 13, 14]


def test_packed_experts_have_the_norms_of_their_modules() -> None:
    norms = delta_norms(packed(), scaling=0.5)
    named = unpacked(packed())
    alone: dict[str, float] = {}
    for key in named:
        module, _, half = key.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        if half == "B":
            delta = 0.5 * named[key].double() @ named[lora_key(module, "A")].double()
            kind = module.rpartition(".")[2]
            alone[kind] = alone.get(kind, 0.0) + float(delta.square().sum())
    assert norms.keys() == {"gate_proj", "up_proj", "down_proj", "q_proj"}
    assert norms == pytest.approx({kind: square**0.5 for kind, square in alone.items()}, rel=1e-5)


def test_a_pair_is_found_by_either_name() -> None:
    tensors = packed()
    named = unpacked(tensors)
    for module in (Q, *(f"{PARENT}.{e}.{leaf}" for e in range(EXPERTS) for leaf in ("gate_proj", "up_proj"))):
        halves = pair(tensors, module)
        assert halves is not None
        assert torch.equal(halves[0], named[lora_key(module, "A")])
        assert torch.equal(halves[1], named[lora_key(module, "B")])
    whole = pair(tensors, DOWN)
    assert whole is not None
    assert whole[1] is tensors[lora_key(DOWN, "B")]
    assert pair(tensors, "model.layers.1.mlp.shared_expert.up_proj") is None
    assert pair(tensors, "model.layers.2.mlp.experts.0.up_proj") is None


def test_shapes_of_experts_become_one() -> None:
    alone = {
        f"{PARENT}.{expert}.{leaf}": shape
        for expert in range(EXPERTS)
        for leaf, shape in (("gate_proj", (4, 5)), ("up_proj", (4, 5)), ("down_proj", (5, 4)))
    }
    expected = {GATE_UP: (3, 8, 5), DOWN: (3, 5, 4), Q: (6, 5)}
    assert packed_shapes(alone | {Q: (6, 5)}) == expected
    assert packed_shapes(expected) == expected


def test_names_of_experts() -> None:
    assert packed_module(f"{PARENT}.2.up_proj") == GATE_UP
    assert packed_module(f"{PARENT}.0.down_proj") == DOWN
    assert packed_module("model.layers.1.mlp.shared_expert.up_proj") is None
    assert leaves(GATE_UP) == ("gate_proj", "up_proj")
    assert leaves(DOWN) == leaves("model.layers.1.mlp.down_proj") == ("down_proj",)
