from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import random_adapter

from relax_pipeline.errors import AdapterError
from relax_pipeline.lora.adapter import (
    make_adapter,
    tensor_digest,
    tensors_digest,
    write_adapter,
)
from relax_pipeline.lora.fingerprint import combine_digests, fingerprint
from relax_pipeline.lora.names import lora_key
from relax_pipeline.types import Adapter, AdapterSpec

SPEC = AdapterSpec(rank=2, alpha=3.0, target_modules=("k_proj", "q_proj"))


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"l.0.q_proj": (5, 3), "l.0.k_proj": (4, 3)}
    return {
        lora_key(module, half): torch.randn(*((2, inside) if half == "A" else (outside, 2)), generator=generator)
        for module, (outside, inside) in shapes.items()
        for half in ("A", "B")
    }


@pytest.fixture
def adapter() -> Adapter:
    return make_adapter(tensors(), spec=SPEC, version=7)


def test_tensor_digest_is_sha256_over_dtype_shape_and_bytes() -> None:
    expected = hashlib.sha256(b"torch.float32|(1, 2)|" + bytes.fromhex("0000803f00000040")).hexdigest()
    assert tensor_digest(torch.tensor([[1.0, 2.0]])) == expected


@pytest.mark.parametrize(
    "other", [torch.tensor([[1.0], [2.0]]), torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([[1.0, 2.5]])]
)
def test_tensor_digest_tells_shapes_dtypes_and_values_apart(other: torch.Tensor) -> None:
    assert tensor_digest(other) != tensor_digest(torch.tensor([[1.0, 2.0]]))


def test_tensor_digest_reads_views_in_their_own_order() -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    assert tensor_digest(matrix.T) == tensor_digest(matrix.T.contiguous())


def test_tensor_digest_reads_bfloat16_and_scalars() -> None:
    digests = {tensor_digest(torch.tensor(v, dtype=torch.bfloat16)) for v in (0.0, 1.0)}
    assert len(digests) == 2


def test_digest_of_many_does_not_depend_on_their_order_and_parts_combine() -> None:
    one, two = torch.ones(2, 3), torch.zeros(4)
    assert tensors_digest({"a": one, "b": two}) == tensors_digest({"b": two, "a": one})
    assert tensors_digest({"a": one, "b": two}) == combine_digests({"b": tensor_digest(two), "a": tensor_digest(one)})
    assert tensors_digest({"a": one, "b": two}) != tensors_digest({"a": two, "b": one})


def test_info_says_what_the_adapter_is(adapter: Adapter) -> None:
    assert adapter.info.version == 7
    assert adapter.info.modules == ("l.0.k_proj", "l.0.q_proj")
    assert adapter.info.num_bytes == 4 * (2 * 3 + 5 * 2 + 2 * 3 + 4 * 2)
    assert adapter.info.digest == fingerprint(tensors())


def test_scaling_is_alpha_over_rank() -> None:
    assert SPEC.scaling == 1.5


def test_an_adapter_of_nothing_is_refused() -> None:
    with pytest.raises(AdapterError, match="holds no tensors: nothing was trained, or export lost it"):
        make_adapter({}, spec=SPEC, version=1)


def test_another_rank_is_refused() -> None:
    spec = AdapterSpec(rank=3, alpha=3.0, target_modules=SPEC.target_modules)
    with pytest.raises(AdapterError, match=r"l\.0\.k_proj: .*have rank \(2, 2\), the adapter's rank is 3"):
        make_adapter(tensors(), spec=spec, version=1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    broken = tensors()
    broken[lora_key("l.0.q_proj", "B")][4, 1] = value
    with pytest.raises(AdapterError, match=r"q_proj\.lora_B\.weight holds NaN or infinity: the policy has diverged"):
        make_adapter(broken, spec=SPEC, version=1)


def test_folder_holds_the_tensors(adapter: Adapter, tmp_path: Path) -> None:
    write_adapter(adapter, tmp_path / "adapter", base_model="/base", metadata={})
    held = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert fingerprint(held) == adapter.info.digest


def test_folder_tells_peft_the_scaling_and_us_the_digest(adapter: Adapter, tmp_path: Path) -> None:
    write_adapter(adapter, tmp_path, base_model="/base", metadata={"base_digest": "abc"})
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (2, 3.0, "/base")
    assert config["target_modules"] == ["k_proj", "q_proj"]
    assert json.loads((tmp_path / "relax_lora_meta.json").read_text()) == {
        "policy_version": 7,
        "digest": tensors_digest(tensors()),
        "base_digest": "abc",
    }


@pytest.mark.parametrize(
    ("module", "excluded"),
    [("model.layers.0.mlp.up_proj", False), ("model.language_model.layers.0.mlp.up_proj", True)],
)
def test_peft_is_told_to_leave_the_part_that_sees_alone(module: str, excluded: bool, tmp_path: Path) -> None:
    adapter = random_adapter([module], {module: (7, 5)}, version=1)
    write_adapter(adapter, tmp_path, base_model="base", metadata={})
    pattern = json.loads((tmp_path / "adapter_config.json").read_text()).get("exclude_modules", "")
    assert bool(re.fullmatch(pattern, "model.visual.blocks.0.mlp.up_proj")) is excluded
    assert not re.fullmatch(pattern, module)
