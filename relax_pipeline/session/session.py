"""The phases of a training run, each one call: restore, sync, rollout, score, train, evaluate, save."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from relax_pipeline.checkpoint.manifest import Identity
from relax_pipeline.checkpoint.mirror import Mirror
from relax_pipeline.checkpoint.store import CheckpointRef, CheckpointStore
from relax_pipeline.config import RunConfig
from relax_pipeline.metrics.log import StepLog
from relax_pipeline.rl.groups import Rollout
from relax_pipeline.session.collect import Collector
from relax_pipeline.session.evaluate import Evaluation, answer_held_out
from relax_pipeline.session.learn import check_learned, learn, rollout_metrics
from relax_pipeline.session.restore import Restored, note_attempt, restore
from relax_pipeline.session.sampler import Sampler
from relax_pipeline.session.samples import samples_row
from relax_pipeline.session.saves import Saves
from relax_pipeline.sync.report import SyncReport
from relax_pipeline.sync.sync import WeightSync
from relax_pipeline.timing import timed
from relax_pipeline.trainer.base import Trainer
from relax_pipeline.types import DataPosition


class TrainingSession:
    """A run on live processes. Steps count from 1; `step` is the number of steps done.

    Attributes:
        config: Of the run.
        run_folder: Where its files are.
        metrics: A row a step.
        samples: Trained prompts and a few completions, a row a step.
        checkpoints: Of the run.
        saves: The checkpoint that is being written.
        run_id: Of the run that `restore` continued or began; kept in its checkpoints.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        run_folder: Path,
        identity: Identity,
        trainer: Trainer,
        sync: WeightSync,
        sampler: Sampler,
        collector: Callable[[DataPosition], Collector],
        evaluation: Evaluation | None,
        note_processes: Callable[[], None],
        mirror: Mirror | None = None,
    ) -> None:
        self.config, self.run_folder = config, run_folder
        self.metrics = StepLog(run_folder / "metrics.jsonl")
        self.samples = StepLog(run_folder / "samples.jsonl")
        self.checkpoints = CheckpointStore(run_folder / "checkpoints")
        self.run_id = ""
        self._identity, self._trainer, self._sync = identity, trainer, sync
        self._sampler, self._make_collector, self._evaluation = sampler, collector, evaluation
        self._note_processes, self._mirror = note_processes, mirror
        self.saves = Saves(config, identity, self.checkpoints, trainer, mirror)
        self._collector: Collector | None = None
        self._position = DataPosition()
        self._rollout: Rollout | None = None
        self._row: dict[str, float] = {}
        self._step_began: float | None = None
        self._trains = False
        """Whether the trainer is, or was when an error came, in the middle of a step."""
        self._unsaved_step: int | None = None
        """The step the trainer and the data position are at, unless it is saved or the next one has begun."""

    def restore(self) -> Restored:
        """Continue from the newest intact checkpoint, or start from the base or lora.start_from.

        Raises:
            AdapterError: lora.start_from does not fit.
            CheckpointError: All checkpoints are damaged, or this configuration cannot continue them.
        """
        restored = restore(self._trainer, self.checkpoints, self._identity, self.config.lora.start_from)
        self.run_id, self._position = restored.run_id, restored.position
        if self._mirror and restored.checkpoint:
            self._mirror.send(restored.checkpoint)
        self.metrics.rewind(restored.step)
        self.samples.rewind(restored.step)
        self._collector = self._make_collector(self._position)
        note_attempt(self.run_folder, restored.step)
        return restored

    def sync(self) -> SyncReport:
        """Bring the engines to the trainer's policy and check that they run it."""
        seconds: dict[str, float] = {}
        with timed(seconds, "seconds/sync"):
            report = self._sync.sync()
        self._note_processes()  # engines may have been replaced
        self._row |= report.metrics() | seconds
        return report

    def rollout(self, step: int) -> dict[str, float]:
        """Wait until the step's completions are generated."""
        assert self._collector is not None, "restore comes first"
        self._step_began = time.perf_counter()
        return {"completions": self._collector.start(step).generated.result()}

    def score(self, step: int) -> dict[str, float]:
        """Wait until the step's completions are scored and enough groups can learn; start rollouts ahead."""
        assert self._collector is not None, "restore comes first"
        self._rollout = self._collector.finish(step, last=self.config.steps)
        metrics = rollout_metrics(self._rollout)
        self._row |= metrics
        return metrics

    def train(self, step: int) -> dict[str, float]:
        """Take the step's optimizer steps."""
        rollout, self._rollout = self._rollout, None
        assert rollout is not None, "score comes first"
        assert rollout.step == step
        self._unsaved_step, self._trains = None, True
        asleep = self._sampler.engines_asleep(self._trainer) if self.config.engine.sleeps else nullcontext()
        with timed(self._row, "seconds/train"), asleep:
            metrics = learn(self._trainer, rollout, self.config)
        self._trains = False
        self._position = rollout.next_position
        self._row |= metrics | {"policy_version": float(self._trainer.policy_version())}
        self.samples.append(step, samples_row(rollout, num_completions=self.config.tracking.sample_completions))
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Answer the held-out prompts with the policy the engines serve."""
        if self._evaluation is None:
            return {}
        with timed(self._row, "seconds/evaluate"):
            metrics = answer_held_out(self._sampler, self._evaluation, seed=self.config.seed)
        self._row |= metrics
        return metrics

    def finish_step(self, step: int) -> dict[str, float]:
        """Write the step's row and return it.

        Raises:
            RunLockedError: Another attempt has taken the run: stop.
        """
        if self._mirror:
            self._mirror.check()
        row, self._row = self._row, {}
        if self._step_began is not None:
            row["seconds/step"] = time.perf_counter() - self._step_began
        self.metrics.append(step, row)
        self._unsaved_step = step or None
        return row

    def save(self, step: int) -> CheckpointRef | None:
        """Write a checkpoint and prune old ones; with checkpoint.background only begin to, unless it is the last step.

        Returns:
            The checkpoint, or None where `commit` has to follow.

        Raises:
            CheckpointError: Nothing was written; earlier checkpoints are as they were.
        """
        with timed(self._row, "seconds/save"):
            self.saves.begin(step, self._position, self.run_id)
        behind = self.config.checkpoint.background and step < self.config.steps
        ref = None if behind else self.commit()
        self._unsaved_step = None
        return ref

    def commit(self) -> CheckpointRef | None:
        """Wait until the checkpoint that was begun is written, and make it count; None if there is none.

        Raises:
            CheckpointError: It was not written; earlier checkpoints are as they were.
        """
        with timed(self._row, "seconds/save"):
            ref = self.saves.commit()
        if ref is not None:
            self._row["save/bytes"] = float(ref.num_bytes)
        return ref

    def save_unsaved(self) -> CheckpointRef | None:
        """Save the last finished step; None if it is saved, or an optimizer step has begun since."""
        return None if self._unsaved_step is None else self.save(self._unsaved_step) or self.commit()

    def check_learned(self) -> None:
        """As `learn.check_learned`."""
        check_learned(self._trainer.policy_version(), self.config)

    def close(self) -> None:
        """Stop rollouts that run ahead, and end a save that was begun. Processes belong to whoever opened the session.

        A trainer in the middle of a step is not waited for: the save before is then the newest.
        """
        if self._collector is not None:
            self._collector.close()
        if not self._trains:
            self.saves.close()
