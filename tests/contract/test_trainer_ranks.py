"""Two ranks against one: the same numbers, the same checkpoints, and failures that reach the caller."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file
from tiny_run import make_samples, run_config, train

from relax_pipeline.config import MegatronTrainerConfig, RunConfig
from relax_pipeline.errors import TrainerError
from relax_pipeline.lora.fingerprint import fingerprint
from relax_pipeline.remote.trainer import RemoteTrainer
from relax_pipeline.trainer.base import RankLayout, Trainer
from relax_pipeline.trainer.fsdp import FsdpTrainer
from relax_pipeline.trainer.make import make_trainer
from relax_pipeline.types import Adapter

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_local")]


def start_pair(config: RunConfig, folder: Path) -> RemoteTrainer:
    meeting = f"file://{folder / uuid4().hex}"
    builds = [partial(make_trainer, config, RankLayout(rank, 2, meeting)) for rank in range(2)]
    return RemoteTrainer(builds, num_threads=1, num_gpus=0, timeout=120)


MEGATRON = pytest.param("megatron", marks=[pytest.mark.megatron, pytest.mark.filterwarnings("ignore")])


@pytest.fixture(scope="module", params=["adapter", "full", MEGATRON])
def config(request: pytest.FixtureRequest, tiny_model: Path) -> RunConfig:
    """The same optimizer in both; eps keeps entries whose gradient is rounding noise from taking full steps."""
    sections: dict[str, Any] = {
        "optimizer": {"learning_rate": 1e-3, "eps": 1e-3},
        "trainer": {"micro_batch_tokens": 30, "num_processes": 2},
    }
    if request.param == "full":
        sections |= {"lora": {"rank": 0}, "sync": {"mode": "merge"}}
    made = run_config(tiny_model, **sections)
    return with_megatron(made, data_parallel_size=2) if request.param == "megatron" else made


def with_megatron(config: RunConfig, *, data_parallel_size: int) -> RunConfig:
    trainer = MegatronTrainerConfig(device="cpu", micro_batch_tokens=30, data_parallel_size=data_parallel_size)
    return config.model_copy(update={"trainer": trainer})


@pytest.fixture(scope="module")
def started(
    config: RunConfig, ray_local: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RemoteTrainer, Path]]:
    """Two ranks, and their state before any step."""
    trainer, fresh = start_pair(config, tmp_path_factory.mktemp("meeting")), tmp_path_factory.mktemp("fresh")
    trainer.save(fresh)
    yield trainer, fresh
    trainer.close()


@pytest.fixture
def pair(started: tuple[RemoteTrainer, Path]) -> RemoteTrainer:
    """The two ranks, as they were before any step."""
    trainer, fresh = started
    trainer.load(fresh)
    return trainer


@pytest.fixture
def single(config: RunConfig) -> Iterator[Trainer]:
    if isinstance(config.trainer, MegatronTrainerConfig):
        config = with_megatron(config, data_parallel_size=1)
    trainer = make_trainer(config, RankLayout())
    yield trainer
    trainer.close()


def assert_same_logprobs(one: Trainer, other: Trainer) -> None:
    samples = make_samples(6, seed=77)
    for a, b in zip(one.logprobs(samples, temperature=1.0), other.logprobs(samples, temperature=1.0), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for names in trainer.bucket_names(1 << 30):
        content = trainer.export_weights(names).content
        tensors |= ray.get(content) if isinstance(content, ray.ObjectRef) else content
    return tensors


def test_both_build_the_same_policy(pair: RemoteTrainer, single: Trainer) -> None:
    assert pair.info() == single.info()
    assert fingerprint(weights(pair)) == fingerprint(weights(single))


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_losses_and_gradients_are_the_same(pair: RemoteTrainer, single: Trainer, count: int) -> None:
    # One sample leaves a rank without work; nine make micro-batches of different sizes.
    for ours, theirs in zip(train(pair, updates=2, count=count), train(single, updates=2, count=count), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    assert pair.policy_version() == 2
    expected = weights(single)
    for name, tensor in weights(pair).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)
    assert pair.adapter_norms() == pytest.approx(single.adapter_norms(), rel=1e-4)


def test_two_ranks_go_on_bit_by_bit(pair: RemoteTrainer, tmp_path: Path) -> None:
    train(pair, updates=2)
    pair.save(tmp_path)
    straight = train(pair, updates=2, first=2), fingerprint(weights(pair))
    pair.load(tmp_path)
    assert pair.policy_version() == 2
    assert (train(pair, updates=2, first=2), fingerprint(weights(pair))) == straight


def test_two_ranks_save_behind_training(pair: RemoteTrainer, tmp_path: Path) -> None:
    train(pair, updates=2)
    pair.begin_save(tmp_path)
    straight = train(pair, updates=2, first=2), fingerprint(weights(pair))
    pair.finish_save()
    pair.load(tmp_path)
    assert pair.policy_version() == 2
    assert (train(pair, updates=2, first=2), fingerprint(weights(pair))) == straight


def test_one_rank_goes_on_from_two(pair: RemoteTrainer, single: Trainer, tmp_path: Path) -> None:
    train(pair, updates=2)
    pair.save(tmp_path)
    single.load(tmp_path)
    assert_same_logprobs(pair, single)
    for ours, theirs in zip(train(pair, updates=2, first=2), train(single, updates=2, first=2), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)


def test_two_ranks_go_on_from_one(pair: RemoteTrainer, single: Trainer, tmp_path: Path) -> None:
    train(single, updates=2)
    single.save(tmp_path)
    pair.load(tmp_path)
    assert pair.policy_version() == 2
    assert_same_logprobs(pair, single)
    for ours, theirs in zip(train(pair, updates=2, first=2), train(single, updates=2, first=2), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)


def test_all_ranks_start_from_an_adapter(
    pair: RemoteTrainer, single: Trainer, config: RunConfig, tmp_path: Path
) -> None:
    if not config.lora.enabled:
        return
    train(single, updates=2)
    single.save(tmp_path)
    pair.start_from(tmp_path / "adapter")
    assert pair.policy_version() == 0
    assert_same_logprobs(pair, single)


def test_portable_adapter_is_whole(pair: RemoteTrainer, config: RunConfig, tmp_path: Path) -> None:
    train(pair, updates=1)
    pair.save(tmp_path)
    if not config.lora.enabled:
        assert not (tmp_path / "adapter").exists()
        return
    exported = ray.get(pair.export_adapter().content)
    assert isinstance(exported, Adapter)
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert fingerprint(saved) == exported.info.digest == pair.export_adapter().info.digest


def test_bfloat16_base_and_float32_adapters_shard_together(tiny_model: Path, tmp_path: Path) -> None:
    config = run_config(tiny_model, model={"dtype": "bfloat16"}, optimizer={"learning_rate": 1e-3, "eps": 1e-3})
    pair = start_pair(config, tmp_path)
    for ours, theirs in zip(train(pair, updates=2), train(FsdpTrainer(config), updates=2), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    pair.close()


def test_loss_that_is_not_finite_is_told(tiny_model: Path, tmp_path: Path) -> None:
    trainer = start_pair(run_config(tiny_model), tmp_path)
    samples = make_samples(5)
    broken = [replace(samples[0], advantage=float("nan")), *samples[1:]]
    with pytest.raises(TrainerError, match="the loss is nan at policy version 0; no weight has changed"):
        trainer.forward_backward(broken, temperature=1.0)


def test_killed_rank_is_named_in_seconds(tiny_model: Path, tmp_path: Path) -> None:
    trainer = start_pair(run_config(tiny_model), tmp_path)
    train(trainer, updates=1)
    os.kill(trainer.pids()[1], signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(TrainerError, match=r"^trainer rank 1 died: "):
        train(trainer, updates=1, first=1)
    assert time.monotonic() - started < 20
