"""The steps of a run, on a real trainer and real engines in this process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_run import run_config
from transformers import AutoTokenizer

from relax_pipeline.checkpoint.seal import verify
from relax_pipeline.config import HfEngineConfig
from relax_pipeline.data.dataset import PromptDataset
from relax_pipeline.data.prompts import load_rows
from relax_pipeline.data.stream import PromptStream
from relax_pipeline.errors import CheckpointError, EngineError, RewardError, SyncError, TrainerError
from relax_pipeline.inputs import run_folder, run_identity
from relax_pipeline.rollout.hf import HfEngine
from relax_pipeline.rollout.pool import EnginePool
from relax_pipeline.session.collect import Collector
from relax_pipeline.session.evaluate import Evaluation
from relax_pipeline.session.sampler import Sampler
from relax_pipeline.session.session import TrainingSession
from relax_pipeline.sync.sync import WeightSync
from relax_pipeline.trainer.fsdp import FsdpTrainer
from relax_pipeline.types import Adapter, Completion, GenerateRequest, SamplingParams, Score, ScoreRequest

ROWS = 7
Judge = Callable[[ScoreRequest], float]


class Scorer:
    """Scores with a function and remembers what it was asked."""

    def __init__(self, judge: Judge) -> None:
        self.judge, self.asked = judge, list[ScoreRequest]()

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        self.asked += requests
        return [Score(self.judge(request), {"accuracy": self.judge(request)}) for request in requests]


def digits(request: ScoreRequest) -> float:
    """Share of digits: most groups have variance."""
    return sum(character.isdigit() for character in request.completion) / max(1, len(request.completion))


class OneAtATime(HfEngine):
    """Does one thing at a time, as engines do that live in processes of their own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._turn = threading.Lock()

    def stage(self, adapter: Adapter) -> None:
        with self._turn:
            super().stage(adapter)

    def retire(self, version: int) -> None:
        with self._turn:
            super().retire(version)

    def generate(self, requests: Sequence[GenerateRequest], *, version: int) -> list[Completion]:
        with self._turn:
            return super().generate(requests, version=version)

    def logprobs(self, sequences: Sequence[Sequence[int]], *, version: int | None) -> list[NDArray[np.float32]]:
        with self._turn:
            return super().logprobs(sequences, version=version)


class Run:
    """A session and the parts it was made of."""

    def __init__(
        self, folder: Path, output: Path, judge: Judge, engine: type[HfEngine] = OneAtATime, **sections: Any
    ) -> None:
        torch.set_num_threads(1)
        output.mkdir(exist_ok=True)
        prompts = output / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": f"{n}+1=", "label": str(n + 1)}) + "\n" for n in range(ROWS)))
        sections = {
            "output_dir": str(output),
            "data": {"train": {"path": str(prompts)}},
            "rollout": {"prompts_per_step": 2, "completions_per_prompt": 3, "max_new_tokens": 6}
            | sections.pop("rollout", {}),
        } | sections
        self.config = config = run_config(folder, **sections)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        dataset = PromptDataset(load_rows(config.data.train), tokenizer, config.data)
        self.trainer, self.scorer = FsdpTrainer(config), Scorer(judge)
        settings = config.engine
        assert isinstance(settings, HfEngineConfig)
        self.pool = EnginePool(
            lambda index: engine(engine_id=f"engine-{index}", model=config.model, config=settings),
            replicas=1,
            restarts=0,
            chunk_size=4,
        )
        sync = WeightSync(
            trainer=self.trainer,
            pool=self.pool,
            config=config.sync,
            tolerance=1e-3,
            probe=[dataset.prompt(0).token_ids],
            keep_versions=config.rollout.staleness + 2,
        )
        sampler = Sampler(
            pool=self.pool,
            scorer=self.scorer,
            tokenizer=tokenizer,
            heal=sync.heal,
            pinned=config.sync.mode == "adapter",
        )
        sampling = SamplingParams(max_new_tokens=config.rollout.max_new_tokens)
        run_folder(config).mkdir(exist_ok=True)
        self.session = TrainingSession(
            config=config,
            run_folder=run_folder(config),
            identity=run_identity(config, dataset.fingerprint),
            trainer=self.trainer,
            sync=sync,
            sampler=sampler,
            collector=lambda position: Collector(
                sampler=sampler,
                stream=PromptStream(dataset, seed=config.seed, shuffle=True, position=position),
                config=config.rollout,
                sampling=sampling,
                seed=config.seed,
            ),
            evaluation=Evaluation([dataset.prompt(index) for index in range(3)], 1, SamplingParams(6, temperature=0)),
            note_processes=lambda: None,
        )

    def steps(self, first: int, last: int) -> list[dict[str, float]]:
        """Do steps as a flow does, the engines synced before the first."""
        rows = []
        for step in range(first, last + 1):
            self.session.sync()
            self.session.rollout(step)
            self.session.score(step)
            self.session.train(step)
            rows.append(self.session.finish_step(step))
        return rows

    def digest(self) -> str:
        return self.trainer.export_adapter().info.digest


@pytest.fixture
def start(tiny_model: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(*, judge: Judge = digits, place: str = "here", restore: bool = True, **sections: Any) -> Run:
        run = Run(tiny_model, tmp_path / place, judge, **sections)
        if restore:
            run.session.restore()
        runs.append(run)
        return run

    yield start
    for run in runs:
        run.session.close()


# --- Steps ---


def test_on_policy_steps_train_on_the_current_version(start: Callable[..., Run]) -> None:
    run = start()
    rows = run.steps(1, 3)
    assert [row["policy_version"] for row in rows] == [1, 2, 3]
    assert [row["staleness/max"] for row in rows] == [0, 0, 0]
    assert all(row["rollout/completions"] >= 6 for row in rows)
    assert all(row["train/rollout_logprob_abs_diff_max"] < 1e-4 for row in rows)
    assert {"seconds/sync", "seconds/generate", "seconds/score", "seconds/train", "seconds/step"} <= rows[0].keys()
    assert rows == [{k: v for k, v in row.items() if k != "step"} for row in run.session.metrics.rows()]


def test_reward_rises(start: Callable[..., Run]) -> None:
    rows = start(rollout={"prompts_per_step": 4, "completions_per_prompt": 8}, steps=12).steps(1, 12)
    rewards = [row["reward/mean"] for row in rows]
    assert np.mean(rewards[-3:]) > 2 * np.mean(rewards[:3])


def test_rollouts_run_ahead_and_never_too_far(start: Callable[..., Run]) -> None:
    rows = start(rollout={"staleness": 2}, steps=8).steps(1, 8)
    behind = [row["staleness/max"] for row in rows]
    assert behind[0] == 0
    assert max(behind) <= 2
    assert behind[-1] > 0


def test_too_old_a_rollout_is_refused(start: Callable[..., Run]) -> None:
    run = start()
    run.session.sync()
    run.session.rollout(1)
    run.session.score(1)
    run.trainer._updates = 1
    with pytest.raises(
        TrainerError, match=r"samples 1 to 1 versions behind policy version 1; .*staleness allows 0 to 0"
    ):
        run.session.train(1)


def test_two_updates_a_rollout_take_two_steps(start: Callable[..., Run]) -> None:
    rows = start(algorithm={"updates_per_rollout": 2}).steps(1, 2)
    assert [row["policy_version"] for row in rows] == [2, 4]
    assert [row["train/updates"] for row in rows] == [2, 2]
    assert rows[0]["train/ratio_mean"] != 1.0


def test_rollout_without_variance_takes_no_step(start: Callable[..., Run]) -> None:
    run = start(judge=lambda request: 1.0, rollout={"max_resample_rounds": 2})
    [row] = run.steps(1, 1)
    assert row["train/updates"] == 0
    assert row["policy_version"] == 0
    assert row["rollout/zero_variance_share"] == 1
    assert row["rollout/completions"] == 3 * 2 * 3  # three rounds of two prompts
    assert run.session.sync().num_bytes == 0
    with pytest.raises(TrainerError, match="no rollout of 20 steps had a group to learn from"):
        run.session.check_learned()


def test_rollout_whose_completions_are_all_cut_takes_no_step_under_the_filter(start: Callable[..., Run]) -> None:
    run = start(rewards={"overlong": {"mode": "filter"}}, rollout={"max_new_tokens": 1})
    [row] = run.steps(1, 1)
    assert (row["train/updates"], row["rollout/cut_share"]) == (0, 1)


def test_run_that_learned_passes(start: Callable[..., Run]) -> None:
    run = start()
    run.steps(1, 1)
    run.session.check_learned()


def test_dropped_groups_are_drawn_again_and_both_are_consumed(start: Callable[..., Run]) -> None:
    even_prompts_vary = start(judge=lambda r: len(r.completion) * (int(r.label) % 2), steps=6)
    run = even_prompts_vary
    run.steps(1, 4)
    trained = [row["trained_prompts"] for row in run.session.samples.rows()]
    assert all(index % 2 == 0 for prompts in trained for index in prompts)  # the label of row n is n + 1
    drawn = [request.prompt for request in run.scorer.asked[::3]]
    assert len(drawn) > sum(len(prompts) for prompts in trained)
    epochs = [drawn[start : start + ROWS] for start in range(0, len(drawn) - ROWS + 1, ROWS)]
    assert all(len(set(epoch)) == ROWS for epoch in epochs)


class Uneven(OneAtATime):
    """Answers sooner what came later."""

    def generate(self, requests: Sequence[GenerateRequest], *, version: int) -> list[Completion]:
        time.sleep(0.3 / (1 + requests[0].seed % 5))
        return super().generate(requests, version=version)


def test_which_group_is_done_first_changes_nothing(start: Callable[..., Run]) -> None:
    runs = []
    for place, engine in (("a", OneAtATime), ("b", Uneven)):
        run = start(
            place=place,
            engine=engine,
            judge=lambda r: len(r.completion) * (int(r.label) % 2),
            rollout={"prompts_per_step": 3},
        )
        run.pool._streams = 1 if place == "a" else 4
        rows = run.steps(1, 2)
        assert any(row["rollout/completions"] > 9 for row in rows)  # some groups were dropped, others drawn for them
        runs.append((run.digest(), [row["trained_prompts"] for row in run.session.samples.rows()]))
    assert runs[0] == runs[1]


def test_same_seed_gives_the_same_run_and_another_seed_another(start: Callable[..., Run]) -> None:
    digests = []
    for place, seed in (("a", 0), ("b", 0), ("c", 1)):
        run = start(place=place, seed=seed)
        run.steps(1, 2)
        digests.append(run.digest())
    assert digests[0] == digests[1] != digests[2]


def test_merge_mode_steps_train_too(start: Callable[..., Run]) -> None:
    rows = start(sync={"mode": "merge"}).steps(1, 2)
    assert [row["policy_version"] for row in rows] == [1, 2]
    assert rows[1]["train/rollout_logprob_abs_diff_max"] < 1e-4


def test_held_out_prompts_are_answered_by_the_served_version(start: Callable[..., Run]) -> None:
    run = start()
    run.steps(1, 1)
    run.session.sync()
    first, again = run.session.evaluate(), run.session.evaluate()
    assert first == again
    assert first["eval/policy_version"] == 1
    assert first["eval/accuracy"] == first["eval/reward"]


def test_trainer_gives_memory_back_before_engines_that_slept_take_theirs(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, events = start(), []
    run.session.sync()
    for owner, method in (
        (run.pool.slots[0].engine, "sleep"),
        (run.trainer, "release_memory"),
        (run.pool.slots[0].engine, "wake"),
    ):
        monkeypatch.setattr(owner, method, partial(events.append, method))
    with run.session._sampler.engines_asleep(run.trainer):
        events.append("train")
    assert events == ["sleep", "train", "release_memory", "wake"]
    with pytest.raises(TrainerError), run.session._sampler.engines_asleep(run.trainer):
        raise TrainerError("lost")
    assert events[4:] == ["sleep", "wake"]


def test_samples_show_what_was_trained(start: Callable[..., Run]) -> None:
    run = start(tracking={"sample_completions": 1})
    run.steps(1, 1)
    [row] = run.session.samples.rows()
    assert len(row["trained_prompts"]) == 2
    [sample] = row["samples"]
    assert sample.keys() == {"prompt", "completion", "label", "reward", "policy_version"}
    assert sample["policy_version"] == 0


# --- Failures ---


def test_scorer_that_fails_fails_the_phase_that_waits_for_it(start: Callable[..., Run]) -> None:
    def fail(request: ScoreRequest) -> float:
        raise RewardError("broken")

    with pytest.raises(RewardError, match="broken"):
        start(judge=fail).steps(1, 1)


class Dead(HfEngine):
    """Refuses to generate."""

    def generate(self, requests: Sequence[GenerateRequest], *, version: int) -> list[Completion]:
        raise EngineError("dead")


def test_engine_that_fails_for_good_fails_the_rollout_phase(start: Callable[..., Run]) -> None:
    run = start(engine=Dead)
    run.session.sync()
    with pytest.raises(SyncError, match=r"no engine holds policy version 0: engine 0 \(0 restarts left\): dead"):
        run.session.rollout(1)


# --- Checkpoints ---


def test_new_run_starts_from_the_base(start: Callable[..., Run]) -> None:
    restored = start(restore=False).session.restore()
    assert (restored.step, restored.policy_version, restored.checkpoint, restored.passed_over) == (0, 0, None, ())


def test_new_run_starts_from_an_adapter_and_a_resumed_one_does_not(start: Callable[..., Run], tmp_path: Path) -> None:
    source = start(place="source")
    source.steps(1, 2)
    source.trainer.save(tmp_path / "source-state")
    lora = {"start_from": str(tmp_path / "source-state" / "adapter")}
    run = start(lora=lora)
    assert run.digest() == source.digest()
    assert run.session.sync().version == 0  # the engine's version 0 is not its base
    run.steps(1, 1)
    run.session.save(1)
    run.session.close()
    resumed = start(lora=lora)
    assert resumed.trainer.policy_version() == 1
    assert resumed.digest() == run.digest()


@pytest.mark.parametrize("staleness", [0, 1])
def test_resumed_run_draws_the_prompts_that_are_left(start: Callable[..., Run], staleness: int) -> None:
    straight, stopped = (start(place=place, rollout={"staleness": staleness}, steps=6) for place in ("a", "b"))
    straight.steps(1, 6)
    stopped.steps(1, 3)
    stopped.session.save(3)
    stopped.steps(4, 4)  # lost
    stopped.session.close()
    resumed = start(place="b", rollout={"staleness": staleness}, steps=6, restore=False)
    restored = resumed.session.restore()
    assert (restored.step, restored.policy_version) == (3, 3)
    assert [row["step"] for row in resumed.session.metrics.rows()] == [1, 2, 3]
    resumed.steps(4, 6)
    if staleness == 0:
        assert resumed.digest() == straight.digest()
        trained = [[row["trained_prompts"] for row in run.session.samples.rows()] for run in (straight, resumed)]
        assert trained[0] == trained[1]


def test_resumed_run_keeps_its_id(start: Callable[..., Run]) -> None:
    run, other = start(), start(place="b")
    run.steps(1, 1)
    run.session.save(1)
    run.session.close()
    assert start().session.run_id == run.session.run_id != other.session.run_id


def test_checkpoint_says_where_the_run_is(start: Callable[..., Run]) -> None:
    run = start()
    run.steps(1, 2)
    manifest = verify(run.session.save(2).path)
    drawn = len({request.prompt for request in run.scorer.asked})
    assert (manifest.step, manifest.policy_version, manifest.run_name) == (2, 2, "tiny")
    assert manifest.epoch * ROWS + manifest.offset == len(run.scorer.asked) // 3
    assert drawn <= ROWS
    assert {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"} <= manifest.files.keys()


def test_only_a_finished_step_that_is_not_saved_can_be_saved_when_the_end_comes(start: Callable[..., Run]) -> None:
    run = start()
    assert run.session.save_unsaved() is None
    run.steps(1, 1)
    ref = run.session.save_unsaved()
    assert ref is not None
    assert ref.step == 1
    assert run.session.save_unsaved() is None
    run.session.sync()
    run.session.rollout(2)
    run.session.score(2)
    run.session.train(2)  # its row is not written yet
    assert run.session.save_unsaved() is None


def test_a_save_behind_the_next_step_is_of_the_step_it_was_begun_at(start: Callable[..., Run]) -> None:
    run = start(checkpoint={"background": True})
    run.steps(1, 1)
    digest = run.digest()
    assert run.session.save(1) is None
    run.steps(2, 2)
    assert run.session.saves.is_writing
    assert run.session.checkpoints.committed() == []
    ref = run.session.commit()
    assert ref is not None
    assert verify(ref.path).step == 1
    assert not run.session.saves.is_writing
    resumed = start()
    assert (resumed.trainer.policy_version(), resumed.digest()) == (1, digest)


def test_run_that_dies_before_a_save_counts_goes_on_from_the_one_before(start: Callable[..., Run]) -> None:
    run = start(checkpoint={"background": True})
    for step in (1, 2):
        run.steps(step, step)
        run.session.commit()
        run.session.save(step)
    run.steps(3, 3)
    resumed = start(checkpoint={"background": True}, restore=False)
    assert resumed.session.restore().step == 1
    resumed.steps(2, 2)
    resumed.session.save(2)
    assert resumed.session.commit() is not None
    assert [ref.step for ref in resumed.session.checkpoints.committed()] == [1, 2]


def test_next_save_waits_for_the_one_before(start: Callable[..., Run]) -> None:
    run = start(checkpoint={"background": True})
    for step in (1, 2):
        run.steps(step, step)
        run.session.save(step)
    assert [ref.step for ref in run.session.checkpoints.committed()] == [1]


def test_the_last_step_is_saved_at_once(start: Callable[..., Run]) -> None:
    run = start(steps=1, checkpoint={"background": True})
    run.steps(1, 1)
    assert run.session.save(1) is not None


def test_save_that_was_begun_is_finished_at_the_end(start: Callable[..., Run]) -> None:
    run = start(checkpoint={"background": True})
    run.steps(1, 1)
    run.session.save(1)
    run.session.close()
    assert [ref.step for ref in run.session.checkpoints.committed()] == [1]


def test_trainer_in_the_middle_of_a_step_is_not_waited_for(start: Callable[..., Run]) -> None:
    run = start(checkpoint={"background": True})
    run.steps(1, 1)
    run.session.save(1)
    run.session.sync()
    run.session.rollout(2)
    run.session.score(2)
    run.trainer.optim_step = lambda: {}["lost"]  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        run.session.train(2)
    run.session.close()
    assert run.session.checkpoints.committed() == []


def test_old_checkpoints_go(start: Callable[..., Run]) -> None:
    run = start(checkpoint={"keep_last": 2, "keep_every": 3})
    for step in range(1, 7):
        run.steps(step, step)
        run.session.save(step)
    assert [ref.step for ref in run.session.checkpoints.committed()] == [3, 5, 6]


def test_damaged_checkpoint_is_passed_over_and_told(start: Callable[..., Run]) -> None:
    run = start()
    for step in (1, 2):
        run.steps(step, step)
        run.session.save(step)
    [_, newest] = run.session.checkpoints.committed()
    (newest.path / "adapter" / "adapter_config.json").write_text("{}")
    restored = start(restore=False).session.restore()
    assert restored.step == 1
    [told] = restored.passed_over
    assert "adapter_config.json has 2 bytes" in told


def test_another_run_is_not_continued(start: Callable[..., Run]) -> None:
    run = start()
    run.steps(1, 1)
    run.session.save(1)
    with pytest.raises(CheckpointError, match=r"rank: checkpoint 3, this run 2; set lora.rank back"):
        start(lora={"rank": 2}, restore=False).session.restore()


def test_state_of_another_version_than_the_manifest_says_is_refused(start: Callable[..., Run]) -> None:
    run = start()
    run.steps(1, 1)
    run.trainer.policy_version = lambda: 5  # type: ignore[method-assign]
    run.session.save(1)
    with pytest.raises(CheckpointError, match="the trainer loaded policy version 1, the manifest says 5"):
        start(restore=False).session.restore()


def test_more_steps_go_on_from_the_end(start: Callable[..., Run]) -> None:
    run = start(steps=2)
    run.steps(1, 2)
    run.session.save(2)
    longer = start(steps=4, restore=False)
    assert longer.session.restore().step == 2
    assert [row["policy_version"] for row in longer.steps(3, 4)] == [3, 4]
