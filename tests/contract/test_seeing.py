"""Models with a part that sees, on text: the fsdp trainer and the hf engine hold them whole and train the language."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_models import write_model
from safetensors.torch import save_file
from tiny_run import assert_drawn_from, make_samples, reference_logprobs, run_config, train

from relax_pipeline.config import HfEngineConfig, RunConfig
from relax_pipeline.models import base_state, load_model
from relax_pipeline.rollout.hf import HfEngine
from relax_pipeline.rollout.sglang.model_folder import read_model_folder
from relax_pipeline.trainer.fsdp import FsdpTrainer
from relax_pipeline.types import GenerateRequest, SamplingParams

FAMILIES = ["qwen3_vl", "qwen2_5_vl", "delta_moe_vl"]
ATTENTION = {"target_modules": ["linear_qkv", "linear_proj"]}
"""The fsdp trainer adapts no packed experts."""


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("seeing") / request.param, request.param)


def config(folder: Path, **sections: Any) -> RunConfig:
    return run_config(folder, **({"lora": ATTENTION} | sections))


def test_the_language_part_trains_as_transformers_has_it(folder: Path) -> None:
    trainer = FsdpTrainer(config(folder))
    assert {name.split(".")[1] for name in trainer.info().modules} == {"language_model"}
    model = load_model(config(folder).model, device=torch.device("cpu"))
    samples = make_samples(5)
    for sample, values in zip(samples, trainer.logprobs(samples, temperature=0.8), strict=True):
        np.testing.assert_allclose(values, reference_logprobs(model, sample, temperature=0.8), rtol=0, atol=1e-5)


def test_the_engine_serves_what_was_trained(folder: Path) -> None:
    trainer = FsdpTrainer(config(folder))
    engine = HfEngine(engine_id="e", model=config(folder).model, config=HfEngineConfig(device="cpu"))
    assert engine.info().base_tensors_digest == trainer.info().base_tensors_digest
    train(trainer, updates=1)
    payload = trainer.export_adapter()
    engine.stage(payload.content)
    assert engine.activate(1).digest == payload.info.digest
    sampling = SamplingParams(max_new_tokens=6, temperature=0.9)
    requests = [GenerateRequest(tuple(range(5, 5 + length)), length, sampling) for length in (1, 4, 2)]
    policy = trainer._policy.model.eval()
    assert_drawn_from(policy, requests, engine.generate(requests, version=1), tolerance=1e-5)


def test_the_sglang_engine_would_hold_the_same_base(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "drafting")
    save_file({"mtp.norm.weight": torch.ones(32)}, tmp_path / "drafting" / "mtp.safetensors")
    held, info = read_model_folder(tmp_path / "drafting"), FsdpTrainer(config(folder)).info()
    assert held.digest(torch.float32) == info.base_tensors_digest
    assert set(info.modules) <= held.linear_shapes().keys()


@pytest.mark.parametrize("rank", [3, 0])
def test_training_goes_on_from_a_checkpoint(rank: int, folder: Path, tmp_path: Path) -> None:
    settings = config(folder, lora=ATTENTION | {"rank": rank}, sync={"mode": "merge"})
    trainer, other = FsdpTrainer(settings), FsdpTrainer(settings)
    train(trainer, updates=1)
    trainer.save(tmp_path / "checkpoint")
    other.load(tmp_path / "checkpoint")
    assert train(other, updates=1, first=1) == train(trainer, updates=1, first=1)


def test_the_part_that_sees_stays_as_it_was(folder: Path) -> None:
    trainer = FsdpTrainer(config(folder, lora={"rank": 0}, sync={"mode": "merge"}, optimizer={"weight_decay": 0.1}))
    base = base_state(load_model(config(folder).model, device=torch.device("cpu")))
    train(trainer, updates=1)
    names = [name for bucket in trainer.bucket_names(1 << 20) for name in bucket]
    tensors = trainer.export_weights(names).content
    assert {name for name in base if torch.equal(base[name], tensors[name])} == {n for n in base if ".visual." in n}
