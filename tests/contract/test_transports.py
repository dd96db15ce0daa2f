"""What every transport must do, between a real trainer and real engines in this process."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tiny_run import run_config, train

from relax_pipeline.config import HfEngineConfig, RunConfig
from relax_pipeline.errors import EngineError
from relax_pipeline.lora.fingerprint import fingerprint
from relax_pipeline.rollout.carried import CarriedTensors
from relax_pipeline.rollout.hf import HfEngine
from relax_pipeline.rollout.pool import EnginePool
from relax_pipeline.rollout.shared import SharedTensors
from relax_pipeline.sync.nccl import Nccl
from relax_pipeline.sync.outbox import make_outbox
from relax_pipeline.sync.sync import WeightSync
from relax_pipeline.trainer.base import RankLayout

KEEP = 2


class World:
    """A trainer behind a transport, and one engine."""

    def __init__(self, config: RunConfig) -> None:
        torch.set_num_threads(1)
        self.config = config
        self.trainer = make_outbox(config, RankLayout())
        self.pool = EnginePool(self.spawn, replicas=1, restarts=9, chunk_size=4)
        self.sync = WeightSync(
            trainer=self.trainer,
            pool=self.pool,
            config=config.sync,
            tolerance=1e-4,
            probe=[(5, 9, 30, 41, 77, 12), (8, 20, 33)],
            keep_versions=KEEP,
        )

    def spawn(self, index: int) -> HfEngine:
        assert isinstance(self.config.engine, HfEngineConfig)
        return HfEngine(engine_id=f"engine-{index}", model=self.config.model, config=self.config.engine)


@pytest.fixture(params=["object_store", "ipc", "disk", "nccl"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["adapter", "merge"])
def world(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path, transport: str) -> Iterator[World]:
    sync = {"mode": request.param, "transport": transport}
    world = World(run_config(tiny_model, output_dir=str(tmp_path), sync=sync, rollout={"staleness": 0}))
    yield world
    world.trainer.close()


def memory_blocks() -> int:
    """Blocks of shared memory this process holds open."""
    return sum("relax-weights" in os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())


def test_engines_hold_what_the_trainer_exports(world: World) -> None:
    for step in range(3):
        report = world.sync.sync()  # compares digests, modules and probe logprobs
        assert (report.version, report.engines, report.quarantined) == (step, ["engine-0"], {})
        train(world.trainer, updates=1, first=step, count=1)


def test_a_replaced_engine_gets_every_version_in_use(world: World) -> None:
    for step in range(4):
        world.sync.sync()
        train(world.trainer, updates=1, first=step, count=1)
    world.pool.quarantine(world.pool.slots[0], "lost")
    world.sync.heal()
    engine = world.pool.slots[0].engine
    versions = [2, 3] if world.config.sync.mode == "adapter" else [3]
    assert [len(engine.logprobs([[5, 6, 7]], version=version)) for version in versions] == [1] * len(versions)


def test_old_versions_are_let_go(world: World, tmp_path: Path) -> None:
    gc.collect()  # what earlier tests left
    before, counts = memory_blocks(), []
    for step in range(5):
        world.sync.sync()
        folders = len(list((tmp_path / "tiny" / "sync").glob("v*")))
        counts.append(max(memory_blocks() - before, folders))
        train(world.trainer, updates=1, first=step, count=1)
    kept = KEEP + 1 if world.config.sync.mode == "adapter" else 1
    fetched = KEEP if world.config.sync.mode == "adapter" else 1  # the engine's side of nccl is in this process, too
    limits = {"object_store": 0, "ipc": kept, "disk": kept, "nccl": kept + fetched}
    assert counts[2:] == [limits[world.config.sync.transport]] * 3


def test_only_the_first_rank_packs(tiny_model: Path, tmp_path: Path) -> None:
    config = run_config(tiny_model, output_dir=str(tmp_path), sync={"mode": "adapter", "transport": "disk"})
    World(config).sync.sync()
    other = make_outbox(config, RankLayout(rank=1, world_size=1))
    assert other.export_adapter().content is None
    assert [folder.name for folder in (tmp_path / "tiny" / "sync").iterdir()] == ["v0"]


def test_folder_that_engines_do_not_share_is_named(tiny_model: Path, tmp_path: Path) -> None:
    config = run_config(tiny_model, output_dir=str(tmp_path), sync={"mode": "adapter", "transport": "disk"})
    world = World(config)
    content = world.trainer.export_adapter().content
    (tmp_path / "tiny" / "sync" / "v0" / "adapter_model.safetensors").unlink()
    with pytest.raises(EngineError, match=r"v0/adapter_model.safetensors is not there: with sync.transport disk"):
        world.pool.slots[0].engine.stage(content)


# --- NCCL, which is gloo here ---


def test_block_larger_than_the_buffer_passes_in_parts(tensors: dict[str, torch.Tensor]) -> None:
    sender = Nccl(backend="gloo", buffer_bytes=7, timeout=20)
    received = pickle.loads(pickle.dumps(sender.weights(tensors, version=1)))
    assert fingerprint(received) == fingerprint(tensors)
    sender.close()


def test_version_that_was_let_go_is_refused_and_the_next_one_sent(tensors: dict[str, torch.Tensor]) -> None:
    sender = Nccl(backend="gloo", buffer_bytes=1 << 20, timeout=20)
    old, new = (pickle.loads(pickle.dumps(sender.weights(tensors, version=version))) for version in (1, 2))
    sender.forget(1)
    with pytest.raises(EngineError, match="sends no weights: the version it asks for is too old"):
        old["a"]
    assert torch.equal(new["a"], tensors["a"])
    sender.close()


def test_sender_that_is_gone_is_an_error(tensors: dict[str, torch.Tensor]) -> None:
    code = "import sys, pickle, torch; from relax_pipeline.sync.nccl import Nccl; "
    code += "n = Nccl(backend='gloo', buffer_bytes=99, timeout=20); "
    code += "sys.stdout.buffer.write(pickle.dumps(n.weights({'a': torch.ones(3)}, version=1))); sys.stdout.flush()"
    gone = pickle.loads(subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE).stdout)
    with pytest.raises(EngineError, match=r"sync.transport nccl: the trainer cannot be reached at"):
        gone["a"]


# --- Shared memory ---


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    values = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(3, 5, generator=values),
        "b": torch.randn(7, generator=values).bfloat16(),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(4, 6, generator=values).T,
    }


def test_shared_tensors_are_equal_where_they_are_opened(tensors: dict[str, torch.Tensor]) -> None:
    block = SharedTensors.write(tensors)
    opened = pickle.loads(pickle.dumps(block))
    assert fingerprint(opened) == fingerprint(tensors)
    assert opened["transposed"].shape == (6, 4)
    block.release()


def test_neither_side_can_change_what_the_other_reads(tensors: dict[str, torch.Tensor]) -> None:
    block = SharedTensors.write(tensors)
    first, second = (pickle.loads(pickle.dumps(block)) for _ in range(2))
    expected = tensors["a"].clone()
    first["a"].zero_()
    tensors["a"].zero_()
    assert torch.equal(second["a"], expected)
    block.release()


def test_tensors_read_before_stay_when_the_block_is_released(tensors: dict[str, torch.Tensor]) -> None:
    block = SharedTensors.write(tensors)
    opened = pickle.loads(pickle.dumps(block))
    held = opened["a"]
    block.release()
    assert torch.equal(held, tensors["a"])
    with pytest.raises(RuntimeError, match="No such file"):
        pickle.loads(pickle.dumps(block))["a"]


def test_a_carried_block_arrives_where_a_server_can_map_it(tensors: dict[str, torch.Tensor]) -> None:
    carried = CarriedTensors.write(tensors)
    arrived = pickle.loads(pickle.dumps(carried, protocol=5))
    assert fingerprint(carried) == fingerprint(arrived) == fingerprint(tensors)
    assert isinstance(arrived, SharedTensors)


@pytest.mark.parametrize("make", [lambda t: t, SharedTensors.write])
def test_digest_does_not_depend_on_the_carrier(
    make: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], tensors: dict[str, torch.Tensor]
) -> None:
    del tensors["empty"]
    assert fingerprint(make(tensors)) == fingerprint(dict(tensors))
