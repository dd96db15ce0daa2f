from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import write_tiny_model
from transformers import PreTrainedModel

from relax_pipeline.config import ModelConfig
from relax_pipeline.errors import ModelError
from relax_pipeline.lora.fingerprint import fingerprint
from relax_pipeline.models import (
    adapter_linears,
    adapter_parameters,
    adapters_disabled,
    base_state,
    inject_adapter,
    linear_leaf_names,
    load_model,
    lora_layers,
    resolve_device,
)
from relax_pipeline.rollout.sglang.model_folder import read_model_folder
from relax_pipeline.types import AdapterSpec

CPU = torch.device("cpu")
Q0, DOWN1 = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
SPEC = AdapterSpec(rank=3, alpha=6.0, target_modules=("down_proj", "q_proj"))
IDS = torch.tensor([[5, 9, 30, 41, 77]])


def load(folder: Path, dtype: str = "float32") -> PreTrainedModel:
    return load_model(ModelConfig.model_validate({"path": str(folder), "dtype": dtype}), device=CPU)


def randomise(model: PreTrainedModel, name: str) -> None:
    torch.manual_seed(1)
    for linear in adapter_linears(model, name).values():
        torch.nn.init.normal_(linear.weight)


@pytest.fixture
def model(tiny_model: Path) -> PreTrainedModel:
    return load(tiny_model)


def test_loads_frozen_in_evaluation_mode_and_in_the_dtype_asked_for(tiny_model: Path) -> None:
    model = load(tiny_model, "bfloat16")
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_tied_model_lacks_nothing(tmp_path: Path) -> None:
    model = load(write_tiny_model(tmp_path, seed=0, tied=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def cut_short(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "is no Hugging Face checkpoint: .*config.json does not exist"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be loaded: .*not a valid JSON file"),
        (lambda f: (f / "model.safetensors").unlink(), "cannot be loaded: .*no file named model.safetensors"),
        (lambda f: cut_short(f / "model.safetensors", 1000), "cannot be loaded: .*invalid header length"),
        (lambda f: cut_short(f / "model.safetensors", -1000), "cannot be loaded: .*file not fully covered"),
        (
            lambda f: edit_weights(f, lambda tensors: tensors.pop(f"{DOWN1}.weight")),
            rf"lacks 1 weights, e\.g\. \['{DOWN1}\.weight'\]; download it again",
        ),
        (
            lambda f: edit_weights(f, lambda tensors: tensors.update({f"{DOWN1}.weight": torch.zeros(3, 2)})),
            "cannot be loaded: .*mismatched_sizes",
        ),
    ],
)
def test_damaged_folders_are_refused(
    tiny_model: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    damage(folder)
    with pytest.raises(ModelError, match=f"model.path '{folder}' {message}"):
        load(folder)


def test_unknown_architecture_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_model / "config.json").read_text()) | {"model_type": "martian"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="martian"):
        load(tmp_path)


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == CPU
    with pytest.raises(ModelError, match="device is cuda, and torch finds no GPU here; set device to auto or cpu"):
        resolve_device("cuda")


def test_leaf_names_are_those_of_linear_layers(model: PreTrainedModel) -> None:
    assert linear_leaf_names(model) == (
        "down_proj",
        "gate_proj",
        "k_proj",
        "lm_head",
        "o_proj",
        "q_proj",
        "up_proj",
        "v_proj",
    )


def test_new_adapter_sits_on_the_named_modules_and_changes_nothing(model: PreTrainedModel) -> None:
    before = model(IDS).logits
    inject_adapter(model, name="a", spec=SPEC, modules=[Q0, DOWN1])
    assert [name for name, _ in lora_layers(model)] == [Q0, DOWN1]
    shapes = {key: tuple(parameter.shape) for key, parameter in adapter_parameters(model, "a").items()}
    assert shapes == {
        f"base_model.model.{Q0}.lora_A.weight": (3, 32),
        f"base_model.model.{Q0}.lora_B.weight": (64, 3),
        f"base_model.model.{DOWN1}.lora_A.weight": (3, 48),
        f"base_model.model.{DOWN1}.lora_B.weight": (32, 3),
    }
    assert torch.equal(model(IDS).logits, before)


def test_injecting_leaves_dropout_off(model: PreTrainedModel) -> None:
    inject_adapter(model, name="a", spec=AdapterSpec(3, 6.0, ("q_proj",), dropout=0.5), modules=[Q0])
    randomise(model, "a")
    assert not any(module.training for module in model.modules())
    assert torch.equal(model(IDS).logits, model(IDS).logits)


def test_adapters_live_side_by_side(model: PreTrainedModel) -> None:
    inject_adapter(model, name="a", spec=SPEC, modules=[Q0, DOWN1])
    inject_adapter(model, name="b", spec=SPEC, modules=[Q0])
    assert len(adapter_parameters(model, "a")) == 4
    assert len(adapter_parameters(model, "b")) == 2
    assert adapter_parameters(model, "c") == {}


def test_disabled_adapters_leave_the_bare_base(model: PreTrainedModel) -> None:
    bare = model(IDS).logits
    inject_adapter(model, name="a", spec=SPEC, modules=[Q0])
    randomise(model, "a")
    adapted = model(IDS).logits
    with adapters_disabled(model):
        assert torch.equal(model(IDS).logits, bare)
    assert not torch.equal(adapted, bare)
    assert torch.equal(model(IDS).logits, adapted)


def test_adapters_come_back_after_an_error(model: PreTrainedModel) -> None:
    inject_adapter(model, name="a", spec=SPEC, modules=[Q0])
    randomise(model, "a")
    adapted = model(IDS).logits
    with pytest.raises(RuntimeError), adapters_disabled(model):
        raise RuntimeError
    assert torch.equal(model(IDS).logits, adapted)


def test_base_state_has_the_names_of_the_folder(tiny_model: Path, model: PreTrainedModel) -> None:
    inject_adapter(model, name="a", spec=SPEC, modules=[Q0, DOWN1])
    stored = load_file(tiny_model / "model.safetensors")
    held = base_state(model)
    assert held.keys() == stored.keys()
    assert all(torch.equal(held[name], stored[name]) for name in stored)


def test_a_tied_head_is_counted_and_hashed_once(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, seed=0, tied=True)
    held = base_state(load(folder))
    assert "model.embed_tokens.weight" in held
    assert "lm_head.weight" not in held
    read = read_model_folder(folder)
    assert read.shapes == {name: tuple(tensor.shape) for name, tensor in held.items()}
    assert read.digest(torch.float32) == fingerprint(held)
    stored = load_file(folder / "model.safetensors") | {"lm_head.weight": torch.ones(80, 32)}
    save_file(stored, folder / "model.safetensors")
    assert read_model_folder(folder).digest(torch.float32) == fingerprint(held)
