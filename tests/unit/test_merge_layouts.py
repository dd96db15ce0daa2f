"""Experts and fused projections: every way an adapter and a base can lay them out, with exact results."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_pipeline.merge.merge import merge_adapter
from tests.merging import CONFIG, Q, added, pair, read_model, whole, write_base, write_lora

PARENT = "model.layers.0.mlp.experts"
EXPERTS, RANK = 3, 2
SIZES = [(8, 3), (4, 6), (8, 4), (5, 5)]
"""(hidden, intermediate): 2I below H, above H, equal to H (gate_up square), and I equal to H (down square)."""


class Layer:
    """The experts of one layer, and per-expert LoRA factors for them, apart."""

    def __init__(self, hidden: int, inter: int) -> None:
        self.hidden, self.inter = hidden, inter
        self.gate, self.up = whole(EXPERTS, inter, hidden, seed=1), whole(EXPERTS, inter, hidden, seed=2)
        self.down = whole(EXPERTS, hidden, inter, seed=3)
        self.A = {"gate": whole(EXPERTS, RANK, hidden, seed=4), "down": whole(EXPERTS, RANK, inter, seed=5)}
        self.B = {
            "gate": whole(EXPERTS, inter, RANK, seed=6),
            "up": whole(EXPERTS, inter, RANK, seed=7),
            "down": whole(EXPERTS, hidden, RANK, seed=8),
        }
        self.A["up"] = self.A["gate"]  # shared, so that gate and up can also be adapted as one

    def merged(self, name: str) -> torch.Tensor:
        return added(getattr(self, name), self.A[name], self.B[name])

    def config(self, model_type: str) -> dict[str, Any]:
        return {**CONFIG, "model_type": model_type, "hidden_size": self.hidden, "moe_intermediate_size": self.inter}


def fuse(gate: torch.Tensor, up: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Join along the output rows of [experts, rows, columns]."""
    return torch.stack([gate, up], dim=2).flatten(1, 2) if interleaved else torch.cat([gate, up], dim=1)


def base_tensors(
    gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, form: str, names: tuple[str, str, str]
) -> dict[str, torch.Tensor]:
    """Return the experts as a checkpoint of one form stores them."""
    if form == "apart":
        return {
            f"{PARENT}.{expert}.{leaf}.weight": weights[expert].contiguous()
            for expert in range(EXPERTS)
            for leaf, weights in zip(names, (gate, up, down), strict=True)
        }
    fused = fuse(gate, up, interleaved="interleaved" in form)
    if "transposed" in form:
        fused, down = fused.mT, down.mT
    return {f"{PARENT}.gate_up_proj": fused.contiguous(), f"{PARENT}.down_proj": down.contiguous()}


def adapter_tensors(
    layer: Layer, form: str, names: tuple[str, str, str], *, interleaved: bool
) -> dict[str, torch.Tensor]:
    """Return the factors as an adapter of one form stores them."""
    if form == "apart":
        return {
            key: tensor
            for expert, (leaf, kind) in itertools.product(
                range(EXPERTS), zip(names, ("gate", "up", "down"), strict=True)
            )
            for key, tensor in pair(f"{PARENT}.{expert}.{leaf}", layer.A[kind][expert], layer.B[kind][expert]).items()
        }
    B = fuse(layer.B["gate"], layer.B["up"], interleaved=interleaved)
    if form == "stacked":
        return pair(f"{PARENT}.gate_up_proj", layer.A["gate"], B) | pair(
            f"{PARENT}.down_proj", layer.A["down"], layer.B["down"]
        )

    def flat(A: torch.Tensor, B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return A.flatten(0, 1), B.permute(1, 2, 0).flatten(1)

    return pair(f"{PARENT}.base_layer", *flat(layer.A["gate"], B)) | pair(
        PARENT, *flat(layer.A["down"], layer.B["down"])
    )


def merge_layer(
    tmp_path: Path, layer: Layer, base_form: str, adapter_form: str, model_type: str, **config: Any
) -> None:
    """Merge and compare every tensor."""
    names = ("w1", "w3", "w2") if model_type == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    tensors = base_tensors(layer.gate, layer.up, layer.down, base_form, names)
    base = write_base(tmp_path / "base", tensors, config=layer.config(model_type), shards=2)
    adapter = adapter_tensors(layer, adapter_form, names, interleaved=model_type == "gpt_oss")
    merge_adapter(base, write_lora(tmp_path / "adapter", adapter, **config), tmp_path / "out")
    expected = base_tensors(layer.merged("gate"), layer.merged("up"), layer.merged("down"), base_form, names)
    result = read_model(tmp_path / "out")
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[name], expected[name]) for name in expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("adapter_form", ["apart", "stacked", "flat"])
@pytest.mark.parametrize(
    ("base_form", "model_type"),
    [
        ("apart", "qwen3_moe"),
        ("apart", "mixtral"),
        ("packed", "qwen3_5_moe"),
        ("packed transposed", "qwen3_vl_moe"),
        ("packed transposed interleaved", "gpt_oss"),
    ],
)
def test_experts(tmp_path: Path, size: tuple[int, int], adapter_form: str, base_form: str, model_type: str) -> None:
    merge_layer(tmp_path, Layer(*size), base_form, adapter_form, model_type, peft_version="0.19.1")


@pytest.mark.parametrize("size", SIZES)
def test_flat_factors_of_peft_before_0_19_run_the_other_way(tmp_path: Path, size: tuple[int, int]) -> None:
    layer = Layer(*size)
    tensors = base_tensors(layer.gate, layer.up, layer.down, "packed", ("", "", ""))
    base = write_base(tmp_path / "base", tensors, config=layer.config("qwen3_5_moe"))
    A, B = whole(RANK * EXPERTS, 2 * layer.inter, seed=20), whole(layer.hidden, RANK * EXPERTS, seed=21)
    adapter = write_lora(tmp_path / "adapter", pair(PARENT, A, B), peft_version="0.18.1")
    merge_adapter(base, adapter, tmp_path / "out")
    delta = torch.einsum("ore,eri->eio", B.view(-1, RANK, EXPERTS), A.view(EXPERTS, RANK, -1))
    fused = tensors[f"{PARENT}.gate_up_proj"]
    assert torch.equal(read_model(tmp_path / "out")[f"{PARENT}.gate_up_proj"], fused + 2 * delta)


def test_mixtral_adapters_named_as_in_memory(tmp_path: Path) -> None:
    stored = "model.layers.0.block_sparse_moe"
    tensors = {f"{stored}.experts.0.w1.weight": whole(6, 4, seed=1), f"{stored}.gate.weight": whole(3, 4, seed=2)}
    base = write_base(tmp_path / "base", tensors, config={**CONFIG, "model_type": "mixtral"})
    A, B, B_gate = whole(2, 4, seed=3), whole(6, 2, seed=4), whole(3, 2, seed=5)
    adapter = pair(f"{PARENT}.0.gate_proj", A, B) | pair("model.layers.0.mlp.gate", A, B_gate)
    merge_adapter(base, write_lora(tmp_path / "adapter", adapter), tmp_path / "out")
    result = read_model(tmp_path / "out")
    assert torch.equal(result[f"{stored}.experts.0.w1.weight"], added(whole(6, 4, seed=1), A, B))
    assert torch.equal(result[f"{stored}.gate.weight"], added(whole(3, 4, seed=2), A, B_gate))


ATTENTION = "model.layers.0.self_attn"
HEADS = {**CONFIG, "model_type": "phi3", "hidden_size": 6, "num_attention_heads": 3, "num_key_value_heads": 1}
ROWS = {"q_proj": slice(0, 6), "k_proj": slice(6, 8), "v_proj": slice(8, 10)}


@pytest.mark.parametrize("leaf", ["q_proj", "k_proj", "v_proj"])
def test_one_projection_goes_into_its_rows_of_a_fused_one(tmp_path: Path, leaf: str) -> None:
    fused = whole(10, 6, seed=1)
    base = write_base(tmp_path / "base", {f"{ATTENTION}.qkv_proj.weight": fused}, config=HEADS)
    rows = ROWS[leaf]
    A, B = whole(2, 6, seed=2), whole(rows.stop - rows.start, 2, seed=3)
    merge_adapter(base, write_lora(tmp_path / "adapter", pair(f"{ATTENTION}.{leaf}", A, B)), tmp_path / "out")
    expected = fused.clone()
    expected[rows] = added(fused[rows], A, B)
    assert torch.equal(read_model(tmp_path / "out")[f"{ATTENTION}.qkv_proj.weight"], expected)


@pytest.mark.parametrize(
    ("fused", "parts"),
    [
        ("self_attn.qkv_proj", {"q_proj": 6, "k_proj": 2, "v_proj": 2}),
        ("mlp.gate_up_proj", {"gate_proj": 5, "up_proj": 5}),
        ("linear_attn.in_proj_qkvz", {"in_proj_qkv": 9, "in_proj_z": 4}),
        ("linear_attn.in_proj_ba", {"in_proj_b": 3, "in_proj_a": 3}),
    ],
)
def test_a_fused_adapter_is_cut_at_the_sizes_of_the_parts(tmp_path: Path, fused: str, parts: dict[str, int]) -> None:
    module = f"model.layers.0.{fused}"
    parent = module.rpartition(".")[0]
    tensors = {f"{parent}.{leaf}.weight": whole(rows, 6, seed=rows) for leaf, rows in parts.items()}
    base = write_base(tmp_path / "base", tensors, config=HEADS, shards=2)
    A, B = whole(2, 6, seed=20), whole(sum(parts.values()), 2, seed=21)
    merge_adapter(base, write_lora(tmp_path / "adapter", pair(module, A, B)), tmp_path / "out")
    result = read_model(tmp_path / "out")
    for (leaf, rows), part in zip(parts.items(), B.split(list(parts.values())), strict=True):
        assert torch.equal(result[f"{parent}.{leaf}.weight"], added(whole(rows, 6, seed=rows), A, part))


def test_gate_and_up_go_into_their_halves(tmp_path: Path) -> None:
    fused = whole(10, 6, seed=1)
    base = write_base(tmp_path / "base", {"model.layers.0.mlp.gate_up_proj.weight": fused}, config=HEADS)
    A, gate, up = whole(2, 6, seed=2), whole(5, 2, seed=3), whole(5, 2, seed=4)
    adapter = pair("model.layers.0.mlp.gate_proj", A, gate) | pair("model.layers.0.mlp.up_proj", A, up)
    merge_adapter(base, write_lora(tmp_path / "adapter", adapter), tmp_path / "out")
    result = read_model(tmp_path / "out")["model.layers.0.mlp.gate_up_proj.weight"]
    assert torch.equal(result, added(fused, A, torch.cat([gate, up])))


def test_gdn_projections_pair_by_name(tmp_path: Path) -> None:
    sizes = {"in_proj_qkv": 9, "in_proj_z": 4, "in_proj_b": 2, "in_proj_a": 2, "out_proj": 6}
    tensors = {f"model.layers.0.linear_attn.{leaf}.weight": whole(rows, 6, seed=rows) for leaf, rows in sizes.items()}
    base = write_base(tmp_path / "base", tensors)
    A = whole(2, 6, seed=30)
    adapter = {
        k: t for name, w in tensors.items() for k, t in pair(name.removesuffix(".weight"), A, whole(len(w), 2)).items()
    }
    merge_adapter(base, write_lora(tmp_path / "adapter", adapter), tmp_path / "out")
    result = read_model(tmp_path / "out")
    assert all(torch.equal(result[name], added(weight, A, whole(len(weight), 2))) for name, weight in tensors.items())


def test_packed_fused_qkv_with_its_own_name_needs_no_layout(tmp_path: Path) -> None:
    base = write_base(
        tmp_path / "base", {f"{ATTENTION}.query_key_value.weight": whole(10, 6, seed=1), f"{Q}.bias": whole(3)}
    )
    A, B = whole(2, 6, seed=2), whole(10, 2, seed=3)
    adapter = write_lora(tmp_path / "adapter", pair(f"{ATTENTION}.query_key_value", A, B))
    merge_adapter(base, adapter, tmp_path / "out")
    result = read_model(tmp_path / "out")[f"{ATTENTION}.query_key_value.weight"]
    assert torch.equal(result, added(whole(10, 6, seed=1), A, B))
