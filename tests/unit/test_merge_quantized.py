"""Merging into quantised bases: codes written as bytes, values read off the formats' own tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_pipeline.errors import MergeError
from relax_pipeline.merge.merge import merge_adapter
from tests.merging import CONFIG, Q, pair, read_model, whole, write_base, write_lora

E4M3_BYTES = {
    0x00: 0.0,
    0x30: 0.5,
    0x38: 1.0,
    0x3C: 1.5,
    0x40: 2.0,
    0x48: 4.0,
    0x7E: 448.0,
    0xB8: -1.0,
    0xC0: -2.0,
    0xFE: -448.0,
}
"""OCP 8-bit floating point specification, E4M3: sign, 4 exponent bits of bias 7, 3 mantissa bits."""
NORM = {"model.norm.weight": whole(6, seed=9)}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {}}},
}


def fp8_codes(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes that use the whole table in turn, and their values."""
    table = list(E4M3_BYTES)
    codes = torch.tensor(
        [[table[(3 * r + c) % len(table)] for c in range(columns)] for r in range(rows)], dtype=torch.uint8
    )
    values = torch.tensor([[E4M3_BYTES[int(code)] for code in row] for row in codes])
    return codes.view(torch.float8_e4m3fn), values


def fp8_config(block: list[int] | None, **more: Any) -> dict[str, Any]:
    return {**CONFIG, "quantization_config": {"quant_method": "fp8", "weight_block_size": block, **more}}


def pack_config(group_size: int | None, *, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    strategy = "group" if group_size else "channel"
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": group_size,
        **more,
    }
    return {**CONFIG, "quantization_config": {**PACKED, "config_groups": {"group_0": {"weights": weights}}}}


def merged(
    tmp_path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], **options: Any
) -> dict[str, torch.Tensor]:
    rows, columns = options.pop("shape", (5, 6))
    base = write_base(tmp_path / "base", tensors | NORM, config=config, shards=2)
    adapter = write_lora(tmp_path / "adapter", pair(Q, *factors(rows, columns)))
    merge_adapter(base, adapter, tmp_path / "out", **options)
    return read_model(tmp_path / "out")


def factors(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    return whole(2, columns, seed=1), whole(rows, 2, seed=2)


def delta(rows: int = 5, columns: int = 6) -> torch.Tensor:
    A, B = factors(rows, columns)
    return 2 * B.double() @ A.double()


def block_scales() -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales of 2 x 4 blocks for a [5, 6] weight, and the same for each entry: the edge blocks are smaller."""
    scales = torch.tensor([[1.0, 0.5], [2.0, 0.25], [4.0, 8.0]])
    return scales, scales.repeat_interleave(2, 0)[:5].repeat_interleave(4, 1)[:, :6]


# --- fp8 ---


def test_block_fp8_becomes_bfloat16_without_quantisation(tmp_path: Path) -> None:
    codes, values = fp8_codes(5, 6)
    scales, each = block_scales()
    other = {"lm_head.weight": codes.clone(), "lm_head.weight_scale_inv": scales.clone()}
    result = merged(tmp_path, {f"{Q}.weight": codes, f"{Q}.weight_scale_inv": scales, **other}, fp8_config([2, 4]))
    assert sorted(result) == ["lm_head.weight", f"{Q}.weight", "model.norm.weight"]
    assert torch.equal(result[f"{Q}.weight"], (values.double() * each.double() + delta()).bfloat16())
    assert torch.equal(result["lm_head.weight"], (values * each).bfloat16())
    assert torch.equal(result["model.norm.weight"], NORM["model.norm.weight"])


def test_dequantised_output_has_a_config_and_an_index_that_fit(tmp_path: Path) -> None:
    codes, _ = fp8_codes(5, 6)
    tensors = {f"{Q}.weight": codes, f"{Q}.weight_scale_inv": torch.ones(3, 2)}
    config = fp8_config([2, 4]) | {"text_config": {"quantization_config": {"quant_method": "fp8"}, "hidden_size": 6}}
    result = merged(tmp_path, tensors, config)
    assert json.loads((tmp_path / "out/config.json").read_text()) == {**CONFIG, "text_config": {"hidden_size": 6}}
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted(result)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in result.values())


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
def test_fp8_with_one_scale(tmp_path: Path, shape: tuple[int, ...], suffix: str) -> None:
    codes, values = fp8_codes(5, 6)
    tensors = {
        f"{Q}.weight": codes,
        f"{Q}.weight{suffix}": torch.full(shape, 0.25),
        f"{Q}.activation_scale": torch.ones(1),
    }
    result = merged(tmp_path, tensors, fp8_config(None, activation_scheme="static"))
    assert sorted(result) == [f"{Q}.weight", "model.norm.weight"]
    assert torch.equal(result[f"{Q}.weight"], (values.double() / 4 + delta()).bfloat16())


@pytest.mark.parametrize(
    ("scheme", "scales"),
    [
        ({"strategy": "channel"}, torch.tensor([[0.5], [1.0], [2.0], [4.0], [0.25]])),
        ({"strategy": "tensor"}, torch.tensor([2.0])),
    ],
)
def test_compressed_tensors_fp8(tmp_path: Path, scheme: dict[str, str], scales: torch.Tensor) -> None:
    codes, values = fp8_codes(5, 6)
    weights = {"num_bits": 8, "type": "float", "symmetric": True, **scheme}
    declared = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"g": {"weights": weights}},
    }
    tensors = {f"{Q}.weight": codes, f"{Q}.weight_scale": scales}
    result = merged(tmp_path, tensors, {**CONFIG, "quantization_config": declared})
    assert torch.equal(result[f"{Q}.weight"], (values.double() * scales.double() + delta()).bfloat16())


def test_packed_fp8_experts_have_scales_of_their_own(tmp_path: Path) -> None:
    codes, values = fp8_codes(3 * 10, 6)
    name, scales = "model.layers.0.mlp.experts.gate_up_proj", torch.tensor([1.0, 2.0, 4.0]).view(3, 1, 1)
    tensors = {name: codes.view(3, 10, 6), f"{name}_scale_inv": scales}
    config = fp8_config(None) | {"hidden_size": 6, "model_type": "qwen3_5_moe"}
    base = write_base(tmp_path / "base", tensors, config=config)
    A, B = whole(3, 2, 6, seed=1), whole(3, 10, 2, seed=2)
    merge_adapter(base, write_lora(tmp_path / "adapter", pair(name, A, B)), tmp_path / "out")
    expected = values.view(3, 10, 6).double() * scales + 2 * B.double() @ A.double()
    assert torch.equal(read_model(tmp_path / "out")[name], expected.bfloat16())


def test_kept_fp8_changes_codes_only_where_the_values_fit_their_scale(tmp_path: Path) -> None:
    codes, values = fp8_codes(5, 6)
    scales, each = block_scales()
    values, codes = values.clamp(-4, 4), codes.float().clamp(-4, 4).to(torch.float8_e4m3fn)
    tensors = {f"{Q}.weight": codes, f"{Q}.weight_scale_inv": scales}
    result = merged(tmp_path, tensors, fp8_config([2, 4]), keep_quantization=True)
    assert torch.equal(result[f"{Q}.weight_scale_inv"], scales)
    assert torch.equal(
        result[f"{Q}.weight"].float(), ((values * each + delta()) / each).to(torch.float8_e4m3fn).float()
    )
    assert json.loads((tmp_path / "out/config.json").read_text()) == fp8_config([2, 4])


def test_kept_fp8_rescales_a_block_that_outgrew_its_scale(tmp_path: Path) -> None:
    codes, values = fp8_codes(5, 6)
    scales, each = block_scales()
    result = merged(
        tmp_path, {f"{Q}.weight": codes, f"{Q}.weight_scale_inv": scales}, fp8_config([2, 4]), keep_quantization=True
    )
    wanted = values.double() * each + delta()
    new = result[f"{Q}.weight_scale_inv"].repeat_interleave(2, 0)[:5].repeat_interleave(4, 1)[:, :6].double()
    peaks = torch.stack([b.abs().max() for r in wanted.split(2, 0) for b in r.split(4, 1)]).view(3, 2)
    expected = torch.where(peaks > 448 * scales, peaks / 448, scales.double())
    assert (expected != scales).any()
    torch.testing.assert_close(result[f"{Q}.weight_scale_inv"].double(), expected, rtol=1e-6, atol=0)
    step = (wanted.abs() * 2**-4 + new * 2**-10) * 1.001
    assert ((result[f"{Q}.weight"].double() * new - wanted).abs() <= step).all()


def test_kept_fp8_with_power_of_two_scales_keeps_them_so(tmp_path: Path) -> None:
    codes, values = fp8_codes(5, 6)
    scale = torch.ones(1, 1).to(torch.float8_e8m0fnu)
    config = fp8_config([8, 8], scale_fmt="ue8m0")
    result = merged(tmp_path, {f"{Q}.weight": codes, f"{Q}.weight_scale_inv": scale}, config, keep_quantization=True)
    assert (values + delta()).abs().max() > 448
    assert result[f"{Q}.weight_scale_inv"].float().item() == 2.0


# --- int4 ---


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Eight 4-bit values an int32, lowest bits first, offset by 8; written out by hand."""
    rows = []
    for row in codes.tolist():
        padded = [value + 8 for value in row] + [0] * (-len(row) % 8)
        words = [sum(padded[8 * w + i] << 4 * i for i in range(8)) for w in range(len(padded) // 8)]
        rows.append([word - (1 << 32) if word >= 1 << 31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def int4_base(group_size: int | None, *, zero: bool = False) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return stored tensors of a [5, 12] weight and its values."""
    codes = (torch.arange(60).view(5, 12) * 7 % 16 - 8).to(torch.int8)
    groups = 12 // (group_size or 12)
    scale = torch.tensor([0.5, 1.0, 2.0, 4.0, 0.25])[:, None].repeat(1, groups) * torch.arange(1, groups + 1)
    points = (torch.arange(5 * groups).view(5, groups) % 5 - 2).to(torch.int8) if zero else torch.zeros(5, groups)
    size = group_size or 12
    values = (codes - points.repeat_interleave(size, 1)) * scale.repeat_interleave(size, 1)
    tensors = {
        f"{Q}.weight_packed": pack(codes),
        f"{Q}.weight_scale": scale.bfloat16(),
        f"{Q}.weight_shape": torch.tensor([5, 12]),
    }
    if zero:
        tensors[f"{Q}.weight_zero_point"] = pack(points.T).T.contiguous()
    return tensors, values


@pytest.mark.parametrize("group_size", [4, None])
@pytest.mark.parametrize("zero", [False, True])
def test_int4_becomes_bfloat16(tmp_path: Path, group_size: int | None, zero: bool) -> None:
    tensors, values = int4_base(group_size, zero=zero)
    result = merged(tmp_path, tensors, pack_config(group_size, symmetric=not zero), shape=(5, 12))
    assert sorted(result) == [f"{Q}.weight", "model.norm.weight"]
    assert torch.equal(result[f"{Q}.weight"], (values.double() + delta(5, 12)).bfloat16())


@pytest.mark.parametrize("group_size", [4, None])
@pytest.mark.parametrize("zero", [False, True])
def test_kept_int4_is_within_half_a_step(tmp_path: Path, group_size: int | None, zero: bool) -> None:
    tensors, values = int4_base(group_size, zero=zero)
    config = pack_config(group_size, symmetric=not zero)
    result = merged(tmp_path, tensors, config, shape=(5, 12), keep_quantization=True)
    assert result.keys() == (tensors | NORM).keys()
    size = group_size or 12
    scale = result[f"{Q}.weight_scale"].double().repeat_interleave(size, 1)
    words = result[f"{Q}.weight_packed"].long() & 0xFFFFFFFF
    codes = torch.stack([(words[:, i // 8] >> 4 * (i % 8)) & 15 for i in range(12)], dim=1) - 8
    points = torch.zeros(5, 12)
    if zero:
        packed = result[f"{Q}.weight_zero_point"].long() & 0xFFFFFFFF
        points = (torch.stack([(packed[0] >> 4 * r) & 15 for r in range(5)]) - 8).repeat_interleave(size, 1)
    error = ((codes - points) * scale - (values.double() + delta(5, 12))).abs()
    assert (error <= scale * 0.5 + 2**-7 * values.abs().max()).all()


def test_int4_codes_match_a_published_word() -> None:
    from relax_pipeline.merge.quantization.int4 import pack_int4, unpack_int4

    codes = torch.tensor([[-8, -7, -1, 0, 1, 7, 3, -3, 5]], dtype=torch.int8)
    words = torch.tensor([[0x5BF98710, 0xD]], dtype=torch.int32)  # compressed-tensors 0.20.1, pack_to_int32
    assert torch.equal(pack_int4(codes), words)
    assert torch.equal(unpack_int4(words, 9), codes)


# --- refusals ---


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "mxfp4", "modelopt", None])
def test_other_methods_are_refused_by_name(tmp_path: Path, method: str | None) -> None:
    config = {**CONFIG, "quantization_config": {"quant_method": method, "bits": 4}}
    with pytest.raises(MergeError, match=repr(method)):
        merged(tmp_path, {f"{Q}.weight": whole(5, 6)}, config)


CODES, ONES = fp8_codes(5, 6)[0], torch.ones(3, 2)
INT4 = int4_base(4)[0]


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({f"{Q}.weight": CODES, f"{Q}.weight_scale_inv": ONES}, CONFIG, "no quantization_config"),
        ({f"{Q}.weight": CODES}, fp8_config([2, 4]), "no scale"),
        ({f"{Q}.weight": whole(5, 6)}, fp8_config([2, 4]), "no tensor is quantised"),
        ({f"{Q}.weight": CODES, f"{Q}.weight_scale_inv": ONES}, fp8_config([4, 4]), r"expected \[2, 2\]"),
        ({f"{Q}.weight": CODES, f"{Q}.weight_scale_inv": ONES}, pack_config(4), "describes int4"),
        (
            {f"{Q}.weight": CODES, f"{Q}.weight_scale_inv": ONES, "x.weight_scale_inv": ONES},
            fp8_config([2, 4]),
            "x.weight_scale_inv",
        ),
        (INT4, pack_config(4, symmetric=False), "contradict"),
        (INT4 | {f"{Q}.weight_g_idx": torch.arange(12)}, pack_config(4), "out of order"),
        (INT4, pack_config(4, num_bits=3), "3-bit"),
        (INT4, pack_config(4, actorder="group"), "actorder 'group'"),
        (INT4 | {f"{Q}.weight_shape": torch.tensor([5, 20])}, pack_config(4), "eight 4-bit values"),
    ],
)
def test_contradictions_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(MergeError, match=message):
        merged(tmp_path, tensors, config)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["transform_config", "sparsity_config", "kv_cache_scheme"])
def test_compressed_tensors_extras_are_refused(tmp_path: Path, key: str) -> None:
    config = pack_config(4)
    config["quantization_config"][key] = {"format": "sparse", "config_groups": {"R1": {}}}
    with pytest.raises(MergeError, match=key):
        merged(tmp_path, INT4, config)


def test_a_whole_tensor_cannot_take_the_place_of_kept_codes(tmp_path: Path) -> None:
    base = write_base(
        tmp_path / "base", {f"{Q}.weight": CODES, f"{Q}.weight_scale_inv": ONES}, config=fp8_config([2, 4])
    )
    adapter = write_lora(tmp_path / "adapter", {f"{Q}.weight": whole(5, 6)})
    with pytest.raises(MergeError, match="without --keep-quantization"):
        merge_adapter(base, adapter, tmp_path / "out", keep_quantization=True)
