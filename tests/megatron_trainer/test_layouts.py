"""However the model is split over ranks, it is the model transformers has, and it trains alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_models import megatron_config
from rank_group import rank_group
from safetensors.torch import save_file
from tiny_run import make_samples, reference_logprobs, train
from transformers import AutoConfig

from relax_pipeline.config import ModelConfig
from relax_pipeline.models import base_state, load_model, model_class
from relax_pipeline.trainer.base import Trainer, TrainerInfo

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

TP = {"tensor_parallel_size": 2}
SP = TP | {"sequence_parallel": True}
PP = {"pipeline_parallel_size": 2}
DP = {"data_parallel_size": 2}
CP = {"context_parallel_size": 2}
EP = DP | {"expert_parallel_size": 2}
PIECES = PP | {"virtual_pipeline_parallel_size": 2}
DELTA = {"target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj"]}
LORA: dict[str, dict[str, Any]] = {"delta": DELTA, "delta_moe": DELTA, "delta_moe_vl": DELTA}
SEEING = ["qwen3_vl", "qwen2_5_vl", "delta_moe_vl"]
SAMPLES = make_samples(7, seed=5)
TEMPERATURE = 0.7


@dataclass(frozen=True)
class Outcome:
    """What a trainer does in three steps."""

    info: TrainerInfo
    before: list[np.ndarray]
    metrics: list[dict[str, float]]
    after: list[np.ndarray]
    adapter: dict[str, torch.Tensor]
    norms: dict[str, float]
    merged: dict[str, torch.Tensor]


def run(trainer: Trainer) -> Outcome:
    info, before = trainer.info(), trainer.logprobs(SAMPLES, temperature=TEMPERATURE)
    metrics = train(trainer, updates=3)
    buckets = [trainer.export_weights(names).content for names in trainer.bucket_names(1 << 15)]
    return Outcome(
        info=info,
        before=before,
        metrics=metrics,
        after=trainer.logprobs(SAMPLES, temperature=TEMPERATURE),
        adapter=trainer.export_adapter().content.tensors,
        norms=trainer.adapter_norms(),
        merged={name: tensor for bucket in buckets for name, tensor in bucket.items()},
    )


@pytest.fixture(scope="session")
def single(folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """What one rank does with a family."""
    outcomes: dict[str, Outcome] = {}

    def of(family: str) -> Outcome:
        if family not in outcomes:
            config = megatron_config(folder(family), lora=LORA.get(family, {}))
            with rank_group(config, tmp_path_factory.mktemp("single")) as trainer:
                outcomes[family] = run(trainer)
        return outcomes[family]

    return of


def assert_close(ones: list[np.ndarray], others: list[np.ndarray], atol: float) -> None:
    for one, other in zip(ones, others, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=atol)


def of_transformers(folder: Path) -> list[np.ndarray]:
    kind = model_class(AutoConfig.from_pretrained(folder))
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    return [reference_logprobs(model, sample, temperature=TEMPERATURE) for sample in SAMPLES]


@pytest.mark.parametrize("family", ["qwen3", "tied", "odd", "llama", "qwen2", "moe", "delta", "delta_moe", *SEEING])
def test_one_rank_has_the_logprobs_of_transformers_before_and_after_training(
    family: str, single: Callable[[str], Outcome], folder: Callable[[str], Path], tmp_path: Path
) -> None:
    outcome = single(family)
    assert_close(outcome.before, of_transformers(folder(family)), 2e-5)
    save_file({name: tensor.contiguous() for name, tensor in outcome.merged.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder(family) / "config.json").read_text())
    assert_close(outcome.after, of_transformers(tmp_path), 3e-5)
    assert np.abs(np.concatenate(outcome.after) - np.concatenate(outcome.before)).max() > 0.1


@pytest.mark.parametrize("family", SEEING)
def test_the_part_that_sees_is_exported_as_it_is(
    family: str, single: Callable[[str], Outcome], folder: Callable[[str], Path]
) -> None:
    base = base_state(load_model(ModelConfig(path=str(folder(family)), dtype="float32"), device=torch.device("cpu")))
    seeing = {name for name in base if name.startswith("model.visual.")}
    merged = single(family).merged
    assert merged.keys() == base.keys()
    assert seeing
    assert all(torch.equal(merged[name], base[name]) for name in seeing)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", TP),
        ("qwen3", SP),
        ("qwen3", PP),
        ("qwen3", PIECES),
        ("qwen3", DP),
        ("qwen3", SP | PP),
        ("qwen3", CP),
        ("qwen3", SP | CP),
        ("tied", PP | CP),
        ("moe", CP),
        ("moe", CP | {"expert_parallel_size": 2}),
        ("delta", CP),
        ("tied", TP),
        ("tied", PP),
        ("odd", TP),
        ("moe", EP),
        ("moe", SP),
        ("moe", SP | {"expert_parallel_size": 2}),
        ("moe", PP | EP),
        ("delta", SP),
        ("delta", PP),
        ("delta_moe", EP),
        ("qwen3_vl", SP | PP),
        ("qwen3_vl", CP),
        ("qwen2_5_vl", TP),
        ("delta_moe_vl", EP),
    ],
)
def test_ranks_together_do_what_one_does(
    family: str, layout: dict[str, Any], single: Callable[[str], Outcome], folder: Callable[[str], Path], tmp_path: Path
) -> None:
    expected = single(family)
    with rank_group(megatron_config(folder(family), lora=LORA.get(family, {}), trainer=layout), tmp_path) as trainer:
        outcome = run(trainer)
    assert outcome.info == expected.info
    assert_close(outcome.before, expected.before, 1e-5)
    for step, expected_step in zip(outcome.metrics, expected.metrics, strict=True):
        assert step == pytest.approx(expected_step, rel=1e-4, abs=1e-5)
    assert_close(outcome.after, expected.after, 3e-5)
    assert outcome.norms == pytest.approx(expected.norms, rel=1e-4)
    for tensors, others in ((outcome.adapter, expected.adapter), (outcome.merged, expected.merged)):
        assert tensors.keys() == others.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, others[name], rtol=0, atol=1e-5, msg=name)
