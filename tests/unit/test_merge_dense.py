"""Dense merges with exact results: names, scalings, kinds of targets."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from relax_pipeline.merge.merge import merge_adapter
from tests.merging import CONFIG, PREFIX, Q, added, pair, read_model, whole, write_base, write_lora

K = "model.layers.0.self_attn.k_proj"
BASE = {
    "model.embed_tokens.weight": whole(11, 6, seed=1),
    f"{Q}.weight": whole(8, 6, seed=2),
    f"{Q}.bias": whole(8, seed=6),
    f"{K}.weight": whole(4, 6, seed=3),
    "model.norm.weight": whole(6, seed=4),
    "lm_head.weight": whole(11, 6, seed=5),
}
A, B = whole(2, 6, seed=10), whole(8, 2, seed=11)


def merged(
    tmp_path: Path, adapter: dict[str, torch.Tensor], *, shards: int = 1, **config: object
) -> dict[str, torch.Tensor]:
    base = write_base(tmp_path / "base", BASE, shards=shards)
    merge_adapter(base, write_lora(tmp_path / "adapter", adapter, **config), tmp_path / "out")  # type: ignore[arg-type]
    return read_model(tmp_path / "out")


@pytest.mark.parametrize("shards", [1, 3])
def test_targeted_weight_is_base_plus_delta_and_all_others_are_the_base(tmp_path: Path, shards: int) -> None:
    result = merged(tmp_path, pair(Q, A, B), shards=shards)
    expected = {**BASE, f"{Q}.weight": added(BASE[f"{Q}.weight"], A, B)}
    assert sorted(result) == sorted(expected)
    assert all(torch.equal(result[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("prefix", "infix"),
    [("", ""), (PREFIX, ""), (PREFIX, ".default"), ("", ".default"), (PREFIX, ".relax_policy_lora")],
)
def test_names_with_and_without_prefix_and_adapter_name(tmp_path: Path, prefix: str, infix: str) -> None:
    adapter = {f"{prefix}{Q}.lora_A{infix}.weight": A, f"{prefix}{Q}.lora_B{infix}.weight": B}
    assert torch.equal(merged(tmp_path, adapter)[f"{Q}.weight"], added(BASE[f"{Q}.weight"], A, B))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_base_keeps_its_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    base = write_base(tmp_path / "base", {name: tensor.to(dtype) for name, tensor in BASE.items()})
    merge_adapter(base, write_lora(tmp_path / "adapter", pair(Q, A, B)), tmp_path / "out")
    result = read_model(tmp_path / "out")[f"{Q}.weight"]
    assert result.dtype == dtype
    assert torch.equal(result, added(BASE[f"{Q}.weight"].to(dtype), A, B))


def test_patterns_give_modules_their_own_rank_and_alpha(tmp_path: Path) -> None:
    adapter = pair(Q, A, B) | pair(K, whole(3, 6, seed=12), whole(4, 3, seed=13))
    patterns = {"rank_pattern": {"layers.0.self_attn.k_proj": 3}, "alpha_pattern": {"k_proj": 12, "other": 1}}
    result = merged(tmp_path, adapter, **patterns)
    assert torch.equal(result[f"{Q}.weight"], added(BASE[f"{Q}.weight"], A, B, 2.0))
    expected = added(BASE[f"{K}.weight"], whole(3, 6, seed=12), whole(4, 3, seed=13), 4.0)
    assert torch.equal(result[f"{K}.weight"], expected)


def test_patterns_match_whole_name_parts_only(tmp_path: Path) -> None:
    result = merged(tmp_path, pair(Q, A, B), alpha_pattern={"proj": 99})
    assert torch.equal(result[f"{Q}.weight"], added(BASE[f"{Q}.weight"], A, B, 2.0))


def test_rslora_divides_by_the_root_of_the_rank(tmp_path: Path) -> None:
    A4, B4 = whole(4, 6, seed=12), whole(8, 4, seed=13)
    result = merged(tmp_path, pair(Q, A4, B4), rank=4, alpha=2, use_rslora=True)
    assert torch.equal(result[f"{Q}.weight"], added(BASE[f"{Q}.weight"], A4, B4, 2 / math.sqrt(4)))


def test_embedding_lora_is_folded_transposed(tmp_path: Path) -> None:
    A, B = whole(2, 11, seed=12), whole(6, 2, seed=13)
    adapter = {
        f"{PREFIX}model.embed_tokens.lora_embedding_A": A,
        f"{PREFIX}model.embed_tokens.lora_embedding_B": B,
        f"{PREFIX}model.embed_tokens.base_layer.weight": BASE["model.embed_tokens.weight"],
    }
    result = merged(tmp_path, adapter)["model.embed_tokens.weight"]
    assert torch.equal(result, added(BASE["model.embed_tokens.weight"], B.T, A.T))


def test_head_lora_is_a_linear_one(tmp_path: Path) -> None:
    A, B = whole(2, 6, seed=12), whole(11, 2, seed=13)
    assert torch.equal(merged(tmp_path, pair("lm_head", A, B))["lm_head.weight"], added(BASE["lm_head.weight"], A, B))


@pytest.mark.parametrize("infix", ["", ".modules_to_save", ".modules_to_save.default"])
def test_tensors_trained_whole_replace_the_base_in_its_dtype(tmp_path: Path, infix: str) -> None:
    new = whole(6, seed=20, dtype=torch.float32) + 0.5
    bias = whole(8, seed=21)
    adapter = pair(Q, A, B) | {f"{PREFIX}model.norm{infix}.weight": new, f"{PREFIX}{Q}.bias": bias}
    result = merged(tmp_path, adapter, modules_to_save=["norm"], bias="lora_only")
    assert torch.equal(result["model.norm.weight"], new.bfloat16())
    assert torch.equal(result[f"{Q}.bias"], bias)


def test_dora_brings_each_row_to_its_magnitude(tmp_path: Path) -> None:
    magnitude = torch.arange(1.0, 9.0)
    adapter = pair(Q, A, B) | {f"{PREFIX}{Q}.lora_magnitude_vector": magnitude}
    result = merged(tmp_path, adapter, use_dora=True)[f"{Q}.weight"]
    direction = BASE[f"{Q}.weight"].double() + 2 * B.double() @ A.double()
    expected = magnitude.double()[:, None] * direction / direction.norm(dim=1, keepdim=True)
    torch.testing.assert_close(result.double(), expected, rtol=2**-8, atol=0)


def test_a_delta_of_zero_is_merged_and_reported(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", BASE)
    adapter = write_lora(tmp_path / "adapter", pair(Q, A, B) | pair(K, whole(2, 6), torch.zeros(4, 2)))
    report = merge_adapter(base, adapter, tmp_path / "out")
    assert report.unchanged == (f"{K}.weight",)
    assert torch.equal(read_model(tmp_path / "out")[f"{K}.weight"], BASE[f"{K}.weight"])


def test_rounding_loss_is_the_share_of_entries_that_did_not_move(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", {**BASE, f"{Q}.weight": torch.full((4, 6), 256, dtype=torch.bfloat16)})
    A, B = torch.ones(1, 6), torch.tensor([[0.5], [0.5], [0.5], [4.0]])  # one step of bfloat16 is 2 from 256 on
    report = merge_adapter(base, write_lora(tmp_path / "adapter", pair(Q, A, B), rank=1, alpha=1), tmp_path / "out")
    assert report.not_moved == {"q_proj": 0.75}


def test_two_layers_deltas_are_accumulated_in_float32_and_rounded_once(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", {**BASE, f"{Q}.weight": torch.full((8, 6), 256, dtype=torch.bfloat16)})
    A, B = torch.ones(3, 6), torch.tensor([[0.5, 0.25, 0.5]]).repeat(8, 1)  # 1.25 in all moves 256 to 258, parts do not
    merge_adapter(base, write_lora(tmp_path / "adapter", pair(Q, A, B), rank=3, alpha=3), tmp_path / "out")
    assert torch.equal(read_model(tmp_path / "out")[f"{Q}.weight"], torch.full((8, 6), 258, dtype=torch.bfloat16))


def test_multimodal_checkpoints_keep_everything_the_adapter_does_not_name(tmp_path: Path) -> None:
    config = {**CONFIG, "text_config": {"hidden_size": 6}, "vision_config": {"depth": 1}, "model_type": "qwen3_vl"}
    tensors = {
        "model.language_model.layers.0.self_attn.q_proj.weight": whole(8, 6, seed=2),
        "model.visual.blocks.0.attn.qkv.weight": whole(9, 3, seed=3),
        "mtp.layers.0.self_attn.q_proj.weight": whole(8, 6, seed=4),
    }
    base = write_base(tmp_path / "base", tensors, config=config)
    adapter = write_lora(tmp_path / "adapter", pair(Q, A, B))  # trained on the text model alone
    merge_adapter(base, adapter, tmp_path / "out")
    changed = "model.language_model.layers.0.self_attn.q_proj.weight"
    expected = {**tensors, changed: added(tensors[changed], A, B)}
    result = read_model(tmp_path / "out")
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[name], expected[name]) for name in expected)
    assert (tmp_path / "out/config.json").read_bytes() == (base / "config.json").read_bytes()
