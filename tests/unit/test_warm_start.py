"""An adapter to start from is taken only where it is what the trainer has built."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from tiny_run import random_adapter, run_config

from relax_pipeline.errors import AdapterError
from relax_pipeline.lora.adapter import WEIGHTS_FILE, write_adapter
from relax_pipeline.lora.warm_start import read_warm_start
from relax_pipeline.safetensors_io.identity import model_digest

SHAPES = {"model.layers.0.mlp.up_proj": (5, 4), "model.layers.1.mlp.up_proj": (5, 4)}
ADAPTER = random_adapter(list(SHAPES), SHAPES, version=9, rank=3)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"model.norm.weight": torch.ones(4)}, str(folder / "model.safetensors"))
    return folder


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    path = tmp_path / "adapter"
    write_adapter(ADAPTER, path, base_model=str(base), metadata={"base_digest": model_digest(base)})
    return path


def read(folder: Path, base: Path, **spec: Any) -> dict[str, torch.Tensor]:
    return read_warm_start(folder, spec=replace(ADAPTER.spec, **spec), modules=ADAPTER.info.modules, base=base)


def change(folder: Path, **values: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_values_arrive_as_they_were_written(folder: Path, base: Path) -> None:
    tensors = read(folder, base)
    assert tensors.keys() == ADAPTER.tensors.keys()
    assert all(torch.equal(tensor, ADAPTER.tensors[name]) for name, tensor in tensors.items())


def test_adapter_of_another_maker_in_half_precision(folder: Path, base: Path) -> None:
    foreign = {name.replace("base_model.model.", ""): t.bfloat16() for name, t in ADAPTER.tensors.items()}
    save_file(foreign, str(folder / WEIGHTS_FILE))
    (folder / "relax_lora_meta.json").unlink()
    tensors = read(folder, base)
    assert tensors.keys() == ADAPTER.tensors.keys()
    assert all(torch.equal(tensor, ADAPTER.tensors[name].bfloat16().float()) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"r": 4}, "r is 4, lora.rank is 3; they must agree"),
        ({"lora_alpha": 5}, "lora_alpha is 5, lora.alpha is 6.0; they must agree"),
        ({"peft_type": "LOHA"}, "{'peft_type': 'LOHA'} cannot be trained on here"),
        ({"use_dora": True}, "{'use_dora': True} cannot"),
        ({"bias": "all"}, "{'bias': 'all'} cannot"),
        ({"init_lora_weights": "pissa"}, "{'init_lora_weights': 'pissa'} cannot"),
    ],
)
def test_settings_that_differ(values: dict[str, Any], message: str, folder: Path, base: Path) -> None:
    change(folder, **values)
    with pytest.raises(AdapterError, match=message):
        read(folder, base)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (ADAPTER.info.modules[:1], r"it lacks \[\] and has \['model.layers.1.mlp.up_proj'\]"),
        ((*ADAPTER.info.modules, "model.layers.2.mlp.up_proj"), r"lacks \['model.layers.2.mlp.up_proj'\] and has \[\]"),
    ],
)
def test_other_modules(modules: tuple[str, ...], message: str, folder: Path, base: Path) -> None:
    with pytest.raises(AdapterError, match=message):
        read_warm_start(folder, spec=ADAPTER.spec, modules=modules, base=base)


def test_another_base(folder: Path, base: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(4)}, str(base / "model.safetensors"))
    with pytest.raises(AdapterError, match=r"was trained on another base than model\.path"):
        read(folder, base)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "adapter_config.json").unlink(),
        lambda folder: (folder / "adapter_config.json").write_text("{"),
        lambda folder: (folder / WEIGHTS_FILE).unlink(),
        lambda folder: (folder / WEIGHTS_FILE).write_bytes(b"not safetensors"),
    ],
    ids=["no config", "config", "no tensors", "tensors"],
)
def test_folder_that_cannot_be_read(damage: Callable[[Path], object], folder: Path, base: Path) -> None:
    damage(folder)
    with pytest.raises(AdapterError, match=r"lora.start_from .* is no PEFT adapter that can be read"):
        read(folder, base)


def test_nothing_takes_an_adapter_over_where_all_weights_train() -> None:
    with pytest.raises(ValidationError, match=r"lora\.start_from is set and lora\.rank is 0"):
        run_config(Path("m"), lora={"rank": 0, "start_from": "a"}, sync={"mode": "merge"})
