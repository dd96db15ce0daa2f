"""Engines that batch over calls: several chunks at once, and failures that come from several of them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from tiny_run import run_config

from relax_pipeline.config import HfEngineConfig
from relax_pipeline.errors import EngineError
from relax_pipeline.rollout.hf import HfEngine
from relax_pipeline.rollout.pool import EnginePool
from relax_pipeline.types import Completion, GenerateRequest, SamplingParams

REQUESTS = [GenerateRequest((5 + place, 9), place, SamplingParams(4)) for place in range(12)]


class Meeting(HfEngine):
    """Goes on with a chunk only when as many are inside as the class expects; then answers or fails."""

    together = threading.Barrier(1)
    fails = False

    def generate(self, requests: Sequence[GenerateRequest], *, version: int) -> list[Completion]:
        self.together.wait(20)
        if self.fails:
            raise EngineError(f"lost with {threading.current_thread().name}")
        return super().generate(requests, version=version)


def make_pool(folder: Path, *, replicas: int, streams: int) -> EnginePool:
    torch.set_num_threads(1)
    config = run_config(folder)
    assert isinstance(config.engine, HfEngineConfig)
    settings = config.engine

    def spawn(index: int) -> HfEngine:
        engine = Meeting(engine_id=f"engine-{index}", model=config.model, config=settings)
        engine.load_weights({}, version=0)
        engine.activate(0)
        return engine

    pool = EnginePool(spawn, replicas=replicas, restarts=3, chunk_size=2, streams=streams)
    pool.serving_version = 0
    for slot in pool.slots:
        pool.admit(slot)
    return pool


def test_each_engine_is_given_its_streams_at_once(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Meeting, "together", threading.Barrier(6))  # two engines, three chunks each, or nobody goes on
    completions = make_pool(tiny_model, replicas=2, streams=3).generate(REQUESTS, version=0, heal=pytest.fail)
    assert len(completions) == 12
    assert sorted(completion.engine_id for completion in completions) == ["engine-0"] * 6 + ["engine-1"] * 6


def test_chunks_of_a_lost_engine_are_done_again_in_place(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make_pool(tiny_model, replicas=1, streams=1).generate(REQUESTS, version=0, heal=pytest.fail)
    pool = make_pool(tiny_model, replicas=1, streams=3)
    monkeypatch.setattr(pool.slots[0].engine, "fails", True)
    monkeypatch.setattr(pool.slots[0].engine, "together", threading.Barrier(3))
    reasons = []

    def heal() -> None:
        reasons.append(pool.slots[0].failure)
        pool.replace_lost()
        pool.admit(pool.slots[0])

    completions = pool.generate(REQUESTS, version=0, heal=heal)
    assert [c.token_ids.tolist() for c in completions] == [c.token_ids.tolist() for c in whole]
    assert len(reasons) == 1  # three chunks failed, the engine is lost once
    assert pool.slots[0].restarts_left == 2


def test_further_requests_are_sampled_while_first_ones_are(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(tiny_model, replicas=1, streams=2)
    further, last = (GenerateRequest((30 + seed, 9), seed, SamplingParams(4)) for seed in (1, 2))
    begun = threading.Event()
    told: list[set[int]] = []

    class Held(HfEngine):
        def generate(self, requests: Sequence[GenerateRequest], *, version: int) -> list[Completion]:
            if requests[0] is REQUESTS[2]:
                assert begun.wait(20)  # until the further request is being sampled
            if requests[0] is further:
                begun.set()
            return super().generate(requests, version=version)

    monkeypatch.setattr(pool.slots[0].engine, "__class__", Held)

    def more(arrived: Mapping[int, Completion]) -> list[GenerateRequest]:
        told.append(set(arrived))
        return [further, further, last] if 0 in arrived else []  # a whole chunk, and one that waits to the end

    completions = pool.generate(REQUESTS[:4], version=0, heal=pytest.fail, more=more)
    assert told[0] == {0, 1}
    assert told[-1] == {6}
    assert set().union(*told) == {0, 1, 2, 3, 4, 5, 6}
    alone = pool.generate([last], version=0, heal=pytest.fail)
    assert completions[6].token_ids.tolist() == alone[0].token_ids.tolist()


def test_an_error_that_is_no_engine_s_ends_the_call(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(HfEngine):
        def generate(self, requests: Sequence[GenerateRequest], *, version: int) -> list[Completion]:
            if requests[0] is REQUESTS[2]:
                raise ValueError("a fault of ours")
            return super().generate(requests, version=version)

    pool = make_pool(tiny_model, replicas=1, streams=3)
    monkeypatch.setattr(pool.slots[0].engine, "__class__", Broken)
    with pytest.raises(ValueError, match=r"^a fault of ours$"):
        pool.generate(REQUESTS, version=0, heal=pytest.fail)


def test_what_asks_for_more_ends_the_call_when_it_fails(tiny_model: Path) -> None:
    def more(_: Mapping[int, Completion]) -> list[GenerateRequest]:
        raise ValueError("no more")

    pool = make_pool(tiny_model, replicas=1, streams=1)
    with pytest.raises(ValueError, match=r"^no more$"):
        pool.generate(REQUESTS, version=0, heal=pytest.fail, more=more)
    assert len(pool.generate(REQUESTS, version=0, heal=pytest.fail)) == 12


def test_failure_of_an_engine_that_is_already_replaced_is_not_the_new_one_s(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(tiny_model, replicas=1, streams=2)
    old, begun = pool.slots[0].engine, threading.Barrier(3)
    monkeypatch.setattr(old, "fails", True)
    monkeypatch.setattr(old, "together", begun)
    rollout = threading.Thread(target=pool.generate, args=(REQUESTS[:4],), kwargs={"version": 0, "heal": pytest.fail})
    rollout.start()
    while begun.n_waiting < 2:
        assert rollout.is_alive()
    pool.quarantine(pool.slots[0], "noticed elsewhere")
    pool.replace_lost()
    pool.admit(pool.slots[0])
    begun.wait(20)
    rollout.join(30)
    assert pool.slots[0].failure is None


def test_a_closed_pool_brings_no_engine_back(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Meeting, "together", threading.Barrier(1))
    pool = make_pool(tiny_model, replicas=1, streams=1)
    pool.close()
    pool.quarantine(pool.slots[0], "stopped")
    with pytest.raises(EngineError, match=r"^the engines were stopped: the run is being closed$"):
        pool.generate(REQUESTS, version=0, heal=pytest.fail)
    with pytest.raises(EngineError, match=r"^the engines were stopped: the run is being closed$"):
        pool.replace_lost()
