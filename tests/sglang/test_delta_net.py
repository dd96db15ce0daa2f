"""A real SGLang server of a tiny Qwen3.5, with an adapter on all that is hosted of its gated delta net."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from megatron_models import DELTA_NET, DENSE, FAMILIES, seeing, write_model
from tiny_run import random_adapter
from tiny_sglang import TOLERANCE, assert_drawn_from, requests, sglang_config
from transformers import AutoModelForImageTextToText, PreTrainedModel

from relax_pipeline.lora.adapter import make_adapter
from relax_pipeline.lora.gates import GATES
from relax_pipeline.lora.names import lora_key
from relax_pipeline.rollout.sglang.make import make_sglang_engine
from relax_pipeline.rollout.sglang.model_folder import read_model_folder
from relax_pipeline.types import Adapter

pytestmark = [pytest.mark.slow, pytest.mark.sglang]

TARGETS = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj"]
TEXT = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,  # SGLang reads this, and not the types of layers
    "linear_num_value_heads": 6,
}


def adapter_on(folder: Path) -> Adapter:
    """A random adapter as Megatron trains it: in_proj has one lora_A, and its gates stay at zero."""
    shapes = {name: shape for name, shape in read_model_folder(folder).linear_shapes().items() if "visual" not in name}
    drawn = random_adapter(list(shapes), shapes, version=1, scale=0.2)
    tensors = dict(drawn.tensors)
    for module in shapes:
        parent, _, leaf = module.rpartition(".")
        if leaf in ("in_proj_z", *GATES):
            tensors[lora_key(module, "A")] = tensors[lora_key(f"{parent}.in_proj_qkv", "A")]
        if leaf in GATES:
            tensors[lora_key(module, "B")] = torch.zeros_like(tensors[lora_key(module, "B")])
    return make_adapter(tensors, spec=drawn.spec, version=1)


def logprobs(model: PreTrainedModel, sequence: list[int]) -> np.ndarray:
    with torch.no_grad():
        logits_SV = model(input_ids=torch.tensor([sequence])).logits[0, :-1]
    chosen_S = logits_SV.log_softmax(-1).gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
    return np.asarray(chosen_S)


def test_adapter_on_a_delta_net_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "delta_vl", ("qwen3_5", seeing(DENSE | DELTA_NET | TEXT)))
    folder = write_model(tmp_path / "model", "delta_vl")
    adapter = adapter_on(folder)
    model: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    sequences = [np.random.default_rng(length).integers(4, 70, length).tolist() for length in (5, 23, 64)]
    engine = make_sglang_engine(sglang_config(folder, tmp_path, lora={"target_modules": TARGETS}), engine_id="engine-0")
    try:
        engine.stage(adapter)
        engine.activate(1)
        bare, served = (engine.logprobs(sequences, version=version) for version in (None, 1))
        completions = engine.generate(requests(4), version=1)
    finally:
        engine.close()
    expected = [logprobs(model, sequence) for sequence in sequences]
    with torch.no_grad():
        for module in adapter.info.modules:
            lora_A, lora_B = (adapter.tensors[lora_key(module, half)] for half in ("A", "B"))
            model.get_submodule(module).weight += adapter.spec.scaling * lora_B @ lora_A  # type: ignore[operator]
    adapted = [logprobs(model, sequence) for sequence in sequences]
    for a, b, c, d in zip(bare, expected, served, adapted, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(c, d, rtol=0, atol=TOLERANCE)
        assert np.abs(d - b).max() > 0.5
    assert_drawn_from(model, requests(4), completions)
