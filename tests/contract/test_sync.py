"""Weight sync between a real trainer and real engines, all in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import write_tiny_model
from tiny_run import run_config, train

from relax_pipeline.config import HfEngineConfig, ModelConfig, RunConfig
from relax_pipeline.errors import AdapterError, EngineError, SyncError, TrainerError, UnknownVersionError
from relax_pipeline.lora.fingerprint import combine_digests
from relax_pipeline.lora.names import lora_key
from relax_pipeline.models import adapter_parameters, base_state
from relax_pipeline.rollout.base import adapter_name
from relax_pipeline.rollout.faulty import FaultyEngine
from relax_pipeline.rollout.hf import HfEngine
from relax_pipeline.rollout.pool import EnginePool
from relax_pipeline.sync.probe import followed_share, probe_difference
from relax_pipeline.sync.sync import WeightSync
from relax_pipeline.sync.verify import check_ack
from relax_pipeline.trainer.fsdp import FsdpTrainer
from relax_pipeline.types import Ack, Adapter, Completion, GenerateRequest, SamplingParams, WeightsInfo

PROBE = [(5, 9, 30, 41, 77, 12), (8, 20, 33)]


class Recording(FaultyEngine):
    """Notes how many bytes it is sent."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.received: list[int] = []

    def stage(self, adapter: Adapter) -> None:
        self.received.append(adapter.info.num_bytes)
        super().stage(adapter)

    def load_weights(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> None:
        self.received.append(sum(tensor.nbytes for tensor in tensors.values()))
        super().load_weights(tensors, version=version)


class Rounding(HfEngine):
    """Keeps adapters in half precision, as an engine might without saying so."""

    def stage(self, adapter: Adapter) -> None:
        tensors = {name: tensor.half().float() for name, tensor in adapter.tensors.items()}
        super().stage(replace(adapter, tensors=tensors))


class Swapping(HfEngine):
    """Takes two tensors of one shape for each other."""

    def stage(self, adapter: Adapter) -> None:
        k, v = (lora_key(f"model.layers.1.self_attn.{leaf}", "B") for leaf in ("k_proj", "v_proj"))
        swapped = {k: adapter.tensors[v], v: adapter.tensors[k]}
        super().stage(replace(adapter, tensors={**adapter.tensors, **swapped}))


class Wedged(HfEngine):
    """Does not let go of an old version."""

    def retire(self, version: int) -> None:
        raise EngineError("gave no answer within 300 s")


class Forgetting(HfEngine):
    """Has no room for adapters on one kind of module."""

    def stage(self, adapter: Adapter) -> None:
        modules = tuple(module for module in adapter.info.modules if not module.endswith("up_proj"))
        super().stage(replace(adapter, info=replace(adapter.info, modules=modules)))


class Renaming(HfEngine):
    """Answers for another version than the one it was told to serve."""

    def activate(self, version: int) -> Ack:
        return replace(super().activate(version), version=version + 1)


class Failing(HfEngine):
    """Breaks on the second part of a model."""

    parts = 0

    def load_weights(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> None:
        self.parts += 1
        if self.parts == 2:
            raise EngineError("out of memory")
        super().load_weights(tensors, version=version)


class World:
    """A trainer, a pool of engines, and the sync between them."""

    def __init__(self, config: RunConfig, kinds: Sequence[type[HfEngine]], *, restarts: int, keep: int) -> None:
        torch.set_num_threads(1)
        self.kinds, self.config = list(kinds), config
        self.trainer = FsdpTrainer(config)
        self.pool = EnginePool(self.spawn, replicas=len(kinds), restarts=restarts, chunk_size=4)
        self.sync = WeightSync(
            trainer=self.trainer,
            pool=self.pool,
            config=config.sync,
            tolerance=config.sync.probe_tolerance or 1e-3,
            probe=PROBE,
            keep_versions=keep,
        )

    def spawn(self, index: int) -> HfEngine:
        assert isinstance(self.config.engine, HfEngineConfig)
        return self.kinds[index](engine_id=f"engine-{index}", model=self.config.model, config=self.config.engine)

    def engine(self, index: int) -> Any:
        return self.pool.slots[index].engine

    def generate(self, version: int | None = None) -> list[Completion]:
        requests = [GenerateRequest((5 + place, 9), place, SamplingParams(5)) for place in range(8)]
        return self.pool.generate(requests, version=version, heal=self.sync.heal)

    def trainer_digest(self) -> str:
        if self.config.sync.mode == "adapter":
            return self.trainer.export_adapter().info.digest
        names = self.trainer.bucket_names(1 << 40)[0]
        return combine_digests(self.trainer.export_weights(names).digests)


@pytest.fixture(params=["adapter", "merge"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def world(tiny_model: Path, mode: str) -> Callable[..., World]:
    def make(*kinds: type[HfEngine], restarts: int = 2, keep: int = 2, **sections: Any) -> World:
        sync = {"mode": mode, "buffer_bytes": 1 << 20} | sections.pop("sync", {})
        config = run_config(tiny_model, sync=sync, **sections)
        return World(config, kinds or (Recording, Recording), restarts=restarts, keep=keep)

    return make


def served_logprobs(world: World, version: int) -> list[np.ndarray]:
    return world.engine(0).logprobs(PROBE, version=version)  # type: ignore[no-any-return]


# --- Both modes ---


def test_each_engine_serves_what_the_trainer_holds(world: Callable[..., World]) -> None:
    pair = world()
    for step in range(3):
        report = pair.sync.sync()
        assert (report.version, report.engines, report.quarantined) == (step, ["engine-0", "engine-1"], {})
        assert report.probe_difference is not None
        assert report.probe_difference < 1e-5
        for index in (0, 1):
            ack = pair.engine(index).activate(step)
            assert ack.digest == pair.trainer_digest()
        assert {completion.policy_version for completion in pair.generate()} == {step}
        train(pair.trainer, updates=1, first=step)


def test_first_version_is_exactly_the_base(world: Callable[..., World], tiny_model: Path) -> None:
    pair = world(HfEngine)
    pair.sync.sync()
    bare = HfEngine(engine_id="bare", model=pair.config.model, config=HfEngineConfig(device="cpu"))
    for a, b in zip(served_logprobs(pair, 0), bare.logprobs(PROBE, version=None), strict=True):
        assert np.array_equal(a, b)


def test_what_an_engine_has_acknowledged_is_not_sent_again(world: Callable[..., World]) -> None:
    pair = world()
    first, second = pair.sync.sync(), pair.sync.sync()
    assert first.num_bytes > 0
    assert second.num_bytes == 0
    assert second.engines == ["engine-0", "engine-1"]
    assert [sum(pair.engine(index).received) for index in (0, 1)] == [first.num_bytes] * 2


def test_restarted_engine_gets_everything_and_the_other_nothing(world: Callable[..., World]) -> None:
    pair = world()
    train(pair.trainer, updates=1)
    sent = pair.sync.sync().num_bytes
    before = pair.pool.slots[0].info
    pair.pool.quarantine(pair.pool.slots[0], "lost")
    report = pair.sync.sync()
    assert pair.pool.slots[0].info.incarnation != before.incarnation
    assert (report.num_bytes, report.quarantined) == (sent, {})
    assert [sum(pair.engine(index).received) for index in (0, 1)] == [sent, sent]


def test_steps_far_below_any_threshold_arrive(world: Callable[..., World]) -> None:
    with pytest.warns(UserWarning, match="under-trains"):
        tiny_steps = world(HfEngine, optimizer={"learning_rate": 5e-7})
    digests = set()
    for step in range(100):
        train(tiny_steps.trainer, updates=1, first=step, count=1)
        report = tiny_steps.sync.sync()
        ack = tiny_steps.engine(0).activate(step + 1)
        assert ack.digest == tiny_steps.trainer_digest()
        assert report.num_bytes > 0
        digests.add(ack.digest)
    assert len(digests) == 100


def test_engine_that_runs_other_weights_is_caught(world: Callable[..., World], mode: str) -> None:
    pair = world()
    pair.sync.sync()
    pair.engine(0).break_with("drop_adapter" if mode == "adapter" else "serve_stale")
    train(pair.trainer, updates=1)
    report = pair.sync.sync()
    assert report.engines == ["engine-1"]
    assert list(report.quarantined) == ["0"]
    reason = "engine-0 does not run version 1" if mode == "adapter" else r"engine-0 holds policy versions [1], not 0"
    assert reason in report.quarantined["0"]
    assert {completion.engine_id for completion in pair.generate()} == {"engine-1"}


def test_another_base_is_refused(world: Callable[..., World], tmp_path: Path) -> None:
    pair = world()
    pair.sync.check_bases()
    other = write_tiny_model(tmp_path, seed=1)
    model = ModelConfig(path=str(other), dtype="float32")
    stranger = HfEngine(engine_id="engine-1", model=model, config=HfEngineConfig(device="cpu"))
    pair.pool.slots[1].info = stranger.info()
    with pytest.raises(SyncError, match=r"engine engine-1 loaded a base with digest .*; both must read the same"):
        pair.sync.check_bases()


def test_replacement_with_another_base_is_refused(world: Callable[..., World], tmp_path: Path) -> None:
    pair = world()
    pair.sync.sync()
    other = write_tiny_model(tmp_path, seed=1)
    pair.config = run_config(other, sync={"mode": pair.config.sync.mode})
    pair.pool.quarantine(pair.pool.slots[0], "lost")
    report = pair.sync.sync()
    assert report.engines == ["engine-1"]
    assert "engine-0 loaded a base with digest" in report.quarantined["0"]


def test_engine_serves_nothing_before_it_is_synced(world: Callable[..., World]) -> None:
    pair = world()
    assert pair.pool.ready() == []
    pair.sync.sync()
    assert len(pair.pool.ready()) == 2
    pair.pool.quarantine(pair.pool.slots[0], "lost")
    pair.pool.replace_lost()
    assert [slot.index for slot in pair.pool.ready()] == [1]
    assert {completion.engine_id for completion in pair.generate()} == {"engine-1"}


def test_engines_found_dead_by_the_sync_are_replaced_within_it(world: Callable[..., World]) -> None:
    class Mortal(HfEngine):
        dead = False

        def activate(self, version: int) -> Ack:
            if self.dead:
                raise EngineError("connection refused")
            return super().activate(version)

    pair = world(Mortal, Mortal)
    pair.sync.sync()
    for index in (0, 1):
        pair.engine(index).dead = True
    train(pair.trainer, updates=1)
    report = pair.sync.sync()
    assert (report.version, report.engines, report.quarantined) == (1, ["engine-0", "engine-1"], {})
    assert [slot.restarts_left for slot in pair.pool.slots] == [1, 1]


def test_no_engine_left_lists_why(world: Callable[..., World]) -> None:
    message = r"^no engine holds policy version 0: engine 0 \(0 restarts left\): burnt 0; engine 1 \(0 .*\): burnt 1$"
    pair = world(restarts=0)
    for slot in pair.pool.slots:
        pair.pool.quarantine(slot, f"burnt {slot.index}")
    with pytest.raises(SyncError, match=message):
        pair.sync.sync()


def test_reason_of_an_engine_that_stays_lost_does_not_grow(world: Callable[..., World]) -> None:
    pair = world(restarts=0)
    pair.pool.quarantine(pair.pool.slots[0], "burnt")
    reasons = [pair.sync.sync().quarantined["0"] for _ in range(3)]
    assert reasons == ["burnt"] * 3


def test_heal_brings_engines_back_to_the_version_served(world: Callable[..., World]) -> None:
    pair = world()
    pair.sync.sync()
    expected = pair.generate()
    train(pair.trainer, updates=1)  # a version that no engine has been sent
    for slot in pair.pool.slots:
        pair.pool.quarantine(slot, "lost")
    healed = pair.generate()
    assert [c.token_ids.tolist() for c in healed] == [c.token_ids.tolist() for c in expected]
    assert {c.policy_version for c in healed} == {0}


def test_unverified_sync_says_so(world: Callable[..., World]) -> None:
    report = world(HfEngine, sync={"verify": False}).sync.sync()
    assert report.probe_difference is None
    assert "sync/probe_difference" not in report.metrics()


def test_probe_is_compared_at_every_nth_sync(world: Callable[..., World]) -> None:
    pair = world(sync={"verify_every": 3})
    differences = []
    for step in range(5):
        differences.append(pair.sync.sync().probe_difference)
        train(pair.trainer, updates=1, first=step, count=1)
    assert [difference is not None for difference in differences] == [True, False, False, True, False]


def test_engines_that_cannot_host_what_is_trained_are_found_before_anything_is_sent(tiny_model: Path) -> None:
    pair = World(run_config(tiny_model), [Recording, Recording], restarts=0, keep=2)
    slot = pair.pool.slots[1]
    slot.info = replace(slot.info, leaf_modules=("q_proj",))
    with pytest.raises(SyncError, match="engine-1 has no room for adapters on down_proj, gate_proj, k_proj, o_proj"):
        pair.sync.sync()
    assert [pair.engine(index).received for index in (0, 1)] == [[], []]


def test_engines_are_sent_a_version_while_the_trainer_computes_its_probe(tiny_model: Path) -> None:
    sent = threading.Event()

    class Telling(HfEngine):
        def stage(self, adapter: Adapter) -> None:
            super().stage(adapter)
            sent.set()

    one = World(run_config(tiny_model), [Telling], restarts=0, keep=2)
    logprobs = one.trainer.logprobs

    def after_the_engine(*args: Any, **kwargs: Any) -> Any:
        assert sent.wait(30)
        return logprobs(*args, **kwargs)

    one.trainer.logprobs = after_the_engine  # type: ignore[method-assign]
    assert one.sync.sync().engines == ["engine-0"]


def test_a_trainer_that_cannot_compute_its_probe_is_no_fault_of_the_engine(tiny_model: Path) -> None:
    one = World(run_config(tiny_model), [HfEngine], restarts=0, keep=2)

    def out_of_memory(*args: Any, **kwargs: Any) -> Any:
        raise TrainerError("out of memory")

    one.trainer.logprobs = out_of_memory  # type: ignore[method-assign]
    with pytest.raises(TrainerError, match="out of memory"):
        one.sync.sync()


def test_a_trainer_that_hangs_ends_the_sync_at_its_deadline(tiny_model: Path) -> None:
    config = run_config(tiny_model, sync={"mode": "adapter", "timeout_seconds": 1})
    one = World(config, [HfEngine], restarts=0, keep=2)
    ended = threading.Event()

    def hang(*args: Any, **kwargs: Any) -> Any:
        ended.wait(60)

    one.trainer.logprobs = hang  # type: ignore[method-assign]
    with pytest.raises(
        TrainerError, match=r"has not computed the probe of a sync within 1 s: it hangs, or sync\.timeout"
    ):
        one.sync.sync()
    assert one.pool.slots[0].failure == "has not been synced yet"  # no fault of the engine
    ended.set()


def test_what_lost_engines_computed_is_let_go(world: Callable[..., World]) -> None:
    one = world(HfEngine, restarts=3)
    for _ in range(3):
        one.sync.sync()
        one.pool.quarantine(one.pool.slots[0], "lost")
    one.sync.heal()
    assert [len(one.sync._probe._engines_bare), len(one.sync._acknowledged)] == [1, 1]


def test_report_has_the_figures_to_plot(world: Callable[..., World], mode: str) -> None:
    pair = world()
    train(pair.trainer, updates=1)
    metrics = pair.sync.sync().metrics()
    assert metrics["sync/engines"] == 2
    assert metrics["sync/bytes"] == (3360 * 4 if mode == "adapter" else 26848 * 4)
    phases = {"sync/export_seconds", "sync/transfer_seconds", "sync/activate_seconds", "sync/verify_seconds"}
    assert phases <= metrics.keys()
    assert ("sync/rounding_share" in metrics) == ("sync/pause_seconds" in metrics) == (mode == "merge")


# --- Adapter mode ---


@pytest.fixture
def adapters(tiny_model: Path) -> Callable[..., World]:
    def make(*kinds: type[HfEngine], keep: int = 2) -> World:
        return World(run_config(tiny_model), kinds, restarts=0, keep=keep)

    return make


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Rounding, "was sent; the tensors were changed on the way"),
        (Swapping, "was sent; the tensors were changed on the way"),
        (Forgetting, "modules missing ['model.layers.0.mlp.up_proj', 'model.layers.1.mlp.up_proj'], not sent []"),
        (Renaming, "engine engine-0 activated version 2, version 1 was sent"),
    ],
)
def test_engine_that_holds_something_else_serves_nothing(
    adapters: Callable[..., World], kind: type[HfEngine], reason: str
) -> None:
    pair = adapters(kind, HfEngine)
    train(pair.trainer, updates=1)
    report = pair.sync.sync()
    assert report.engines == ["engine-1"]
    assert reason in report.quarantined["0"]
    assert {completion.engine_id for completion in pair.generate()} == {"engine-1"}


def test_engine_that_serves_the_version_before_is_caught(adapters: Callable[..., World]) -> None:
    pair = adapters(FaultyEngine, FaultyEngine)
    pair.sync.sync()
    pair.engine(0).break_with("serve_stale")
    train(pair.trainer, updates=1)
    assert "engine-0 does not run version 1: probe logprobs differ by" in pair.sync.sync().quarantined["0"]


def test_engine_that_serves_the_base_is_caught_in_bfloat16(tiny_model: Path) -> None:
    class Bare(HfEngine):
        def logprobs(self, sequences: Sequence[Sequence[int]], *, version: int | None) -> list[np.ndarray]:
            return super().logprobs(sequences, version=None)

    config = run_config(tiny_model, model={"dtype": "bfloat16"}, sync={"probe_tolerance": 10.0})
    pair = World(config, [Bare, HfEngine], restarts=0, keep=2)
    pair.sync.sync()
    train(pair.trainer, updates=1)
    report = pair.sync.sync()
    assert report.engines == ["engine-1"]
    assert "its probe logprobs made 0% of the trainer's way from the base" in report.quarantined["0"]


def test_diverged_adapter_is_an_error_and_not_a_skip(adapters: Callable[..., World]) -> None:
    one = adapters(HfEngine)
    one.sync.sync()
    train(one.trainer, updates=1)
    parameters = adapter_parameters(one.trainer._policy.model, "policy")
    with torch.no_grad():
        next(iter(parameters.values()))[0, 0] = float("nan")
    with pytest.raises(AdapterError, match="holds NaN or infinity: the policy has diverged"):
        one.sync.sync()
    assert {completion.policy_version for completion in one.generate(version=0)} == {0}


def test_old_versions_stay_for_rollouts_under_way_and_then_go(adapters: Callable[..., World]) -> None:
    one = adapters(HfEngine, keep=2)
    for step in range(4):
        one.sync.sync()
        train(one.trainer, updates=1, first=step, count=1)
    for version in (2, 3):
        assert {completion.policy_version for completion in one.generate(version)} == {version}
    for version in (0, 1):
        with pytest.raises(UnknownVersionError):
            one.engine(0).logprobs(PROBE, version=version)
        assert not adapter_parameters(one.engine(0)._model, adapter_name(version))


def test_engine_that_lets_go_of_no_version_is_taken_out_and_the_others_serve(adapters: Callable[..., World]) -> None:
    pair = adapters(Wedged, HfEngine, keep=1)
    for step in range(2):
        pair.sync.sync()
        train(pair.trainer, updates=1, first=step, count=1)
    assert pair.pool.slots[0].failure == "gave no answer within 300 s"
    assert {completion.engine_id for completion in pair.generate()} == {"engine-1"}


def test_replaced_engine_gets_every_version_still_in_use(tiny_model: Path) -> None:
    one = World(run_config(tiny_model), [Recording], restarts=1, keep=2)
    for step in range(3):
        one.sync.sync()
        train(one.trainer, updates=1, first=step, count=1)
    one.pool.quarantine(one.pool.slots[0], "lost")
    one.sync.heal()
    assert len(one.engine(0).received) == 2
    for version in (1, 2):
        assert {completion.policy_version for completion in one.generate(version)} == {version}


# --- Merge mode ---


def test_part_of_a_model_is_never_served(tiny_model: Path) -> None:
    config = run_config(tiny_model, sync={"mode": "merge", "buffer_bytes": 1 << 20})
    broken = World(config, [Failing, HfEngine], restarts=0, keep=2)
    object.__setattr__(broken.config.sync, "buffer_bytes", 20_000)  # below what a user may set: several buckets
    report = broken.sync.sync()
    assert report.quarantined == {"0": "out of memory"}
    assert {completion.engine_id for completion in broken.generate()} == {"engine-1"}
    for version in (None, 0):
        with pytest.raises(UnknownVersionError):
            broken.engine(0).logprobs(PROBE, version=version)


def test_weights_changed_on_the_way_are_caught(tiny_model: Path) -> None:
    class Tampering(HfEngine):
        def activate(self, version: int) -> Ack:
            base_state(self._model)["model.norm.weight"][0] += 1e-6
            return super().activate(version)

    config = run_config(tiny_model, sync={"mode": "merge"})
    report = World(config, [Tampering, HfEngine], restarts=0, keep=2).sync.sync()
    assert "was sent; the tensors were changed on the way" in report.quarantined["0"]


def test_rounding_of_bfloat16_is_reported(tiny_model: Path) -> None:
    config = run_config(
        tiny_model,
        model={"dtype": "bfloat16"},
        sync={"mode": "merge", "probe_tolerance": 0.25},
        optimizer={"learning_rate": 1e-3},
    )
    one = World(config, [HfEngine], restarts=0, keep=2)
    assert one.sync.sync().rounding_share is None
    train(one.trainer, updates=1)
    share = one.sync.sync().rounding_share
    assert share is not None
    assert 0.1 < share < 1


def test_chunk_under_way_ends_before_weights_change(tiny_model: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow(HfEngine):
        def generate(self, requests: Sequence[GenerateRequest], *, version: int) -> list[Completion]:
            begun.set()
            assert go_on.wait(30)
            return super().generate(requests, version=version)

    one = World(run_config(tiny_model, sync={"mode": "merge"}), [Slow], restarts=0, keep=2)
    one.sync.sync()
    train(one.trainer, updates=1)
    completions: list[Completion] = []
    rollout = threading.Thread(target=lambda: completions.extend(one.generate()))
    syncing = threading.Thread(target=one.sync.sync)
    rollout.start()
    assert begun.wait(30)
    syncing.start()
    syncing.join(1)
    assert syncing.is_alive()
    assert one.pool.serving_version == 0
    go_on.set()
    rollout.join(30)
    syncing.join(30)
    versions = [completion.policy_version for completion in completions]
    assert versions in ([0] * 4 + [1] * 4, [0] * 8)  # chunks of four
    assert one.pool.ready()


# --- Checks ---

SENT = WeightsInfo(version=3, digest="a" * 64, modules=("k", "q"), num_bytes=8)
ACK = Ack("engine-0", "i", 3, "a" * 64, ("k", "q"))


def test_equal_acknowledgement_passes() -> None:
    check_ack(ACK, SENT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "engine engine-0 activated version 2, version 3 was sent"),
        ({"modules": ("q", "x")}, r"engine engine-0, version 3: modules missing \['k'\], not sent \['x'\]"),
        ({"digest": "b" * 64}, "holds digest bbbbbbbbbbbb, aaaaaaaaaaaa was sent"),
    ],
)
def test_unequal_acknowledgement_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SyncError, match=message):
        check_ack(replace(ACK, **change), SENT)


def test_probe_difference_is_the_mean_and_nan_is_infinite() -> None:
    base = [np.array([-1.0, -2.0], dtype=np.float32), np.array([-3.0], dtype=np.float32)]
    other = [np.array([-1.0, -2.5], dtype=np.float32), np.array([-3.25], dtype=np.float32)]
    assert probe_difference(base, other) == 0.25
    for value in (np.nan, np.inf, -np.inf):
        broken = [base[0], np.array([value], dtype=np.float32)]
        assert probe_difference(broken, base) == float("inf")
        assert probe_difference(base, broken) == float("inf")


@pytest.mark.parametrize("served", [0.0, 0.4, 1.0])
def test_noise_of_bfloat16_hides_the_difference_and_not_the_direction(served: float) -> None:
    truth, moved, *noise = _draws(way=0.2, noise=0.02)
    bare, now = (truth + noise[0], truth + noise[1]), (truth + served * moved + noise[2], truth + moved + noise[3])
    share = followed_share([bare[0]], [now[0]], [bare[1]], [now[1]])
    assert share == pytest.approx(served, abs=0.05)


@pytest.mark.parametrize("seed", range(20))
def test_an_engine_that_follows_is_never_refused_for_noise(seed: int) -> None:
    for way in (0.01, 0.03, 0.05, 0.1):
        truth, moved, *noise = _draws(way=way, noise=0.03, seed=seed)
        now = truth + moved + noise[2], truth + moved + noise[3]
        share = followed_share([truth + noise[0]], [now[0]], [truth + noise[1]], [now[1]])
        assert share is None or share > 0.5


def test_a_way_shorter_than_the_noise_decides_nothing() -> None:
    truth, moved, *noise = _draws(way=0.01, noise=0.02)
    assert followed_share([truth + noise[0]], [truth + moved + noise[1]], [truth], [truth + moved]) is None
    assert followed_share([truth], [truth], [truth], [truth]) is None


def _draws(*, way: float, noise: float, seed: int = 0) -> list[np.ndarray]:
    """Return logprobs, how they move, and four times what a kernel's rounding does to them."""
    draw = np.random.default_rng(seed)
    return [draw.normal(-3, 1, 120), draw.normal(0, way, 120), *(draw.normal(0, noise, 120) for _ in range(4))]
