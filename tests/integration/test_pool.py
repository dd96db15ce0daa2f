"""Engines in processes of their own that die, hang and lie, on a real Ray: the run's samples do not change."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tiny_run import run_config, train

from relax_pipeline.config import HfEngineConfig
from relax_pipeline.errors import ModelError, SyncError
from relax_pipeline.remote.engine import RemoteEngine
from relax_pipeline.rollout.faulty import Fault, FaultyEngine
from relax_pipeline.rollout.hf import HfEngine
from relax_pipeline.rollout.pool import EnginePool
from relax_pipeline.sync.sync import WeightSync
from relax_pipeline.trainer.fsdp import FsdpTrainer
from relax_pipeline.types import Completion, GenerateRequest, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_local")]

REQUESTS = [GenerateRequest((5 + place % 7, 9), place, SamplingParams(6)) for place in range(20)]
CHUNK = 4


class World:
    """A trainer here, engines in other processes, and an undisturbed pool here to compare with."""

    def __init__(self, folder: Path, *, replicas: int, restarts: int, deadline: float) -> None:
        self.config = run_config(folder)
        self.trainer = FsdpTrainer(self.config)
        assert isinstance(self.config.engine, HfEngineConfig)

        def build(kind: type[HfEngine], index: int) -> partial[HfEngine]:
            return partial(kind, engine_id=f"engine-{index}", model=self.config.model, config=self.config.engine)

        def spawn(index: int) -> RemoteEngine:
            return RemoteEngine(
                build(FaultyEngine, index),
                name=f"engine {index}",
                num_threads=1,
                num_gpus=0,
                control_timeout=60,
                generate_timeout=deadline,
            )

        self.pool = EnginePool(spawn, replicas=replicas, restarts=restarts, chunk_size=CHUNK)
        self.sync = self.sync_to(self.pool)
        self.undisturbed = EnginePool(lambda i: build(HfEngine, i)(), replicas=replicas, restarts=0, chunk_size=CHUNK)
        self.undisturbed_sync = self.sync_to(self.undisturbed)

    def sync_to(self, pool: EnginePool) -> WeightSync:
        return WeightSync(
            trainer=self.trainer,
            pool=pool,
            config=self.config.sync,
            tolerance=1e-3,
            probe=[(5, 9, 30, 41, 77), (8, 20, 33)],
            keep_versions=2,
        )

    def step(self) -> None:
        """Train a step and bring all engines to the new version."""
        train(self.trainer, updates=1, first=self.trainer.policy_version())
        self.sync.sync()
        self.undisturbed_sync.sync()

    def break_engine(self, index: int, fault: Fault) -> None:
        engine = self.pool.slots[index].engine
        assert isinstance(engine, RemoteEngine)
        engine.control("break_with", fault)

    def generate(self) -> list[Completion]:
        return self.pool.generate(REQUESTS, version=None, heal=self.sync.heal)

    def expected(self) -> list[Completion]:
        return self.undisturbed.generate(REQUESTS, version=None, heal=pytest.fail)


@pytest.fixture(scope="module")
def world(ray_local: None, tiny_model: Path) -> Iterator[World]:
    """Two engines that are replaced as often as needed."""
    world = World(tiny_model, replicas=2, restarts=100, deadline=8)
    yield world
    world.pool.close()


@pytest.fixture
def healthy(world: World) -> World:
    """Both engines on a new version."""
    world.step()
    assert len(world.pool.ready()) == 2
    return world


def assert_same(got: list[Completion], expected: list[Completion]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert np.array_equal(a.rollout_logprobs, b.rollout_logprobs)
        assert (a.finish_reason, a.policy_version) == (b.finish_reason, b.policy_version)


def test_undisturbed_engines_share_the_work(healthy: World) -> None:
    completions = healthy.generate()
    assert_same(completions, healthy.expected())
    assert {completion.engine_id for completion in completions} == {"engine-0", "engine-1"}


def test_engine_that_dies_loses_no_sample(healthy: World) -> None:
    healthy.break_engine(0, "die")
    completions = healthy.generate()
    assert_same(completions, healthy.expected())
    assert {completion.engine_id for completion in completions} == {"engine-1"}
    assert healthy.pool.slots[0].failure is not None
    assert healthy.pool.slots[0].failure.startswith("engine 0 died: ")


def test_engine_that_hangs_is_killed_at_its_deadline(healthy: World) -> None:
    healthy.break_engine(1, "hang")
    started = time.monotonic()
    assert_same(healthy.generate(), healthy.expected())
    assert 8 <= time.monotonic() - started < 20
    assert healthy.pool.slots[1].failure == "engine 1 gave no answer within 8 s and was killed"


@pytest.mark.parametrize("fault", ["drop_adapter", "serve_stale"])
def test_engine_that_runs_other_weights_is_caught_before_it_serves(healthy: World, fault: Fault) -> None:
    healthy.break_engine(0, fault)
    healthy.step()
    failure = healthy.pool.slots[0].failure
    assert failure is not None
    assert "engine-0 does not run version" in failure
    completions = healthy.generate()
    assert_same(completions, healthy.expected())
    assert {completion.engine_id for completion in completions} == {"engine-1"}


def test_lost_engine_is_replaced_and_synced_before_it_serves(healthy: World) -> None:
    lost = healthy.pool.slots[0].info.incarnation
    healthy.break_engine(0, "die")
    healthy.generate()
    healthy.step()
    completions = healthy.generate()
    assert_same(completions, healthy.expected())
    incarnations = {completion.incarnation for completion in completions}
    assert incarnations == {slot.info.incarnation for slot in healthy.pool.slots}
    assert lost not in incarnations


def test_all_engines_lost_are_brought_back_within_the_call(healthy: World) -> None:
    for index in (0, 1):
        healthy.break_engine(index, "die")
    assert_same(healthy.generate(), healthy.expected())


def test_no_restart_left_lists_why(ray_local: None, tiny_model: Path) -> None:
    world = World(tiny_model, replicas=1, restarts=0, deadline=30)
    world.step()
    world.break_engine(0, "die")
    with pytest.raises(
        SyncError, match=r"no engine holds policy version 1: engine 0 \(0 restarts left\): engine 0 died"
    ):
        world.generate()
    world.pool.close()


def test_engine_that_cannot_be_built_says_why(tiny_model: Path, tmp_path: Path) -> None:
    model = run_config(tmp_path / "nothing").model
    engine = RemoteEngine(
        partial(HfEngine, engine_id="engine-0", model=model, config=HfEngineConfig(device="cpu")),
        name="engine 0",
        num_threads=1,
        num_gpus=0,
        control_timeout=60,
        generate_timeout=60,
    )
    with pytest.raises(ModelError, match="is no Hugging Face checkpoint"):
        engine.info()
    engine.close()
