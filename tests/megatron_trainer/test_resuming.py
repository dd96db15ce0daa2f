"""A checkpoint saved under one layout of ranks goes on under any other, and bit by bit under the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_models import megatron_config
from peft import PeftModel
from rank_group import rank_group
from safetensors.torch import load_file
from tiny_run import make_samples, reference_logprobs, train

from relax_pipeline.config import ModelConfig
from relax_pipeline.errors import CheckpointError
from relax_pipeline.lora.fingerprint import fingerprint
from relax_pipeline.merge.merge import merge_adapter
from relax_pipeline.models import base_state, load_model
from relax_pipeline.trainer.base import Trainer

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tensor": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "pieces": {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2},
    "data": {"data_parallel_size": 2},
    "context": {"context_parallel_size": 2},
}
TWO_LAYOUTS = {name: LAYOUTS[name] for name in ("one", "tensor")}
EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "experts": {"data_parallel_size": 2, "expert_parallel_size": 2},
    "all": {
        "tensor_parallel_size": 2,
        "sequence_parallel": True,
        "expert_parallel_size": 2,
        "pipeline_parallel_size": 2,
    },
}
DELTA = {"target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj"]}
SAMPLES = make_samples(6, seed=5)


@pytest.fixture(
    scope="module",
    params=[
        ("qwen3", LAYOUTS, {}),
        ("moe", EXPERT_LAYOUTS, {}),
        ("delta", TWO_LAYOUTS, DELTA),
        ("qwen3_vl", TWO_LAYOUTS, {}),
    ],
    ids=["dense", "moe", "delta", "seeing"],
)
def trainers(
    request: pytest.FixtureRequest, folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, tuple[Trainer, Path]]]:
    """A group of ranks for each layout, and a checkpoint of its second step."""
    family, layouts, lora = request.param
    started = {}
    with ExitStack() as stack:
        for name, layout in layouts.items():
            path = tmp_path_factory.mktemp(name)
            trainer = stack.enter_context(rank_group(megatron_config(folder(family), lora=lora, trainer=layout), path))
            train(trainer, updates=2)
            trainer.save(path / "checkpoint")
            started[name] = trainer, path / "checkpoint"
        yield started


def test_every_layout_goes_on_from_every_other(trainers: dict[str, tuple[Trainer, Path]]) -> None:
    straight: dict[str, tuple[Any, ...]] = {}
    for name, (trainer, checkpoint) in trainers.items():
        trainer.load(checkpoint)
        straight[name] = go_on(trainer)
    for target, (trainer, _) in trainers.items():
        for source, (_, checkpoint) in trainers.items():
            trainer.load(checkpoint)
            assert trainer.policy_version() == 2
            logprobs, metrics, adapter = go_on(trainer)
            if source == target:
                assert metrics == straight[source][1]
                assert fingerprint(adapter) == fingerprint(straight[source][2])
                continue
            for one, other in zip(logprobs, straight[source][0], strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=2e-5, err_msg=f"{source} to {target}")
            for step, expected in zip(metrics, straight[source][1], strict=True):
                assert step == pytest.approx(expected, rel=1e-4, abs=1e-5), f"{source} to {target}"
            for tensor_name, tensor in adapter.items():
                torch.testing.assert_close(tensor, straight[source][2][tensor_name], rtol=0, atol=2e-5)


def go_on(trainer: Trainer) -> tuple[list[np.ndarray], list[dict[str, float]], dict[str, torch.Tensor]]:
    logprobs = trainer.logprobs(SAMPLES, temperature=1.0)
    return logprobs, train(trainer, updates=1, first=2), trainer.export_adapter().content.tensors


def test_all_layouts_write_the_same_adapter(trainers: dict[str, tuple[Trainer, Path]]) -> None:
    one, *others = (load_file(path / "adapter" / "adapter_model.safetensors") for _, path in trainers.values())
    for other in others:
        assert other.keys() == one.keys()
        for name, tensor in other.items():
            torch.testing.assert_close(tensor, one[name], rtol=0, atol=2e-5)


def test_new_processes_go_on_bit_by_bit(folder: Callable[[str], Path], tmp_path: Path) -> None:
    config = megatron_config(
        folder("qwen3"),
        lora={"dropout": 0.2},
        model={"dtype": "bfloat16"},
        trainer={"tensor_parallel_size": 2, "recompute": "full"},
    )
    with rank_group(config, tmp_path) as trainer:
        train(trainer, updates=2)
        trainer.save(tmp_path / "checkpoint")
        straight = go_on(trainer)
    with rank_group(config, tmp_path) as trainer:
        trainer.load(tmp_path / "checkpoint")
        resumed = go_on(trainer)
    assert all(np.array_equal(one, other) for one, other in zip(resumed[0], straight[0], strict=True))
    assert resumed[1] == straight[1]
    assert fingerprint(resumed[2]) == fingerprint(straight[2])


def test_whole_checkpoints_hold_a_base_that_trained_too(folder: Callable[[str], Path], tmp_path: Path) -> None:
    sections: dict[str, Any] = {"lora": {"rank": 0}, "sync": {"mode": "merge"}}
    tensor, pipeline = ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2})
    with rank_group(megatron_config(folder("tied"), **sections, trainer=tensor), tmp_path) as trainer:
        train(trainer, updates=2)
        trainer.save(tmp_path / "checkpoint")
        straight = train(trainer, updates=2, first=2)
    with rank_group(megatron_config(folder("tied"), **sections, trainer=pipeline), tmp_path) as trainer:
        trainer.load(tmp_path / "checkpoint")
        resumed = train(trainer, updates=2, first=2)
    for step, expected in zip(resumed, straight, strict=True):
        assert step == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_vl", "qwen2_5_vl"])
def test_the_adapter_of_two_ranks_loads_with_peft(family: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    with rank_group(megatron_config(folder(family), trainer=LAYOUTS["tensor"]), tmp_path) as trainer:
        train(trainer, updates=3)
        trainer.save(tmp_path / "checkpoint")
        logprobs = trainer.logprobs(SAMPLES, temperature=1.0)
    base = load_model(ModelConfig(path=str(folder(family)), dtype="float32"), device=torch.device("cpu"))
    model = PeftModel.from_pretrained(base, tmp_path / "checkpoint" / "adapter").eval()
    for sample, values in zip(SAMPLES, logprobs, strict=True):
        expected = reference_logprobs(model, sample, temperature=1.0)
        np.testing.assert_allclose(values, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "delta_moe_vl"])
def test_a_merge_of_the_folders_gives_what_the_trainer_exports(
    family: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    lora = DELTA if family == "delta_moe_vl" else {}
    with rank_group(megatron_config(folder(family), lora=lora, sync={"mode": "merge"}), tmp_path) as trainer:
        train(trainer, updates=2)
        trainer.save(tmp_path / "checkpoint")
        buckets = [trainer.export_weights(names).content for names in trainer.bucket_names(1 << 15)]
    exported = {name: tensor for bucket in buckets for name, tensor in bucket.items()}
    merge_adapter(folder(family), tmp_path / "checkpoint", tmp_path / "merged")
    merged = ModelConfig(path=str(tmp_path / "merged"), dtype="float32")
    held = base_state(load_model(merged, device=torch.device("cpu")))
    assert held.keys() == exported.keys()
    assert all(torch.equal(held[name], exported[name]) for name in held)


def test_a_failed_load_is_told_by_all_ranks_and_leaves_them_usable(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    with rank_group(megatron_config(folder("qwen3"), trainer=LAYOUTS["data"]), tmp_path) as trainer:
        with pytest.raises(CheckpointError, match="trainer cannot be loaded"):
            trainer.load(tmp_path / "missing")
        train(trainer, updates=1)
