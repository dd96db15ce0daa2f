"""The phases of a training run, each one call: restore, sync, rollout, score, train, evaluate, save."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from relax_pipeline.checkpoint.manifest import Identity, Manifest, check_continues, read_manifest
from relax_pipeline.checkpoint.mirror import Mirror
from relax_pipeline.checkpoint.store import CheckpointRef, CheckpointStore
from relax_pipeline.config import RunConfig
from relax_pipeline.errors import CheckpointError, TrainerError
from relax_pipeline.metrics.log import StepLog
from relax_pipeline.session.collect import Collector, Sampler
from relax_pipeline.session.evaluate import Evaluation, answer_held_out
from relax_pipeline.session.learn import learn, rollout_metrics
from relax_pipeline.session.pause import read_changes
from relax_pipeline.session.saves import Saves
from relax_pipeline.sync.report import SyncReport
from relax_pipeline.sync.sync import WeightSync
from relax_pipeline.trainer.base import Trainer
from relax_pipeline.types import DataPosition, Rollout


@dataclass(frozen=True, slots=True)
class Restored:
    """Where a session starts."""

    step: int
    """Steps done."""
    policy_version: int
    checkpoint: Path | None
    """None: from the base."""
    passed_over: tuple[str, ...]
    """Newer checkpoints that were damaged, and how."""


class TrainingSession:
    """A run on live processes. Steps count from 1; `step` is the number of steps done.

    Attributes:
        config: Of the run.
        run_folder: Where its files are.
        metrics: A row a step.
        samples: Trained prompts and a few completions, a row a step.
        checkpoints: Of the run.
        run_id: Of a run that was begun from its base or adapter; kept in its checkpoints.
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
        processes: Callable[[], dict[str, Any]],
        mirror: Mirror | None = None,
    ) -> None:
        self.config, self.run_folder = config, run_folder
        self.metrics = StepLog(run_folder / "metrics.jsonl")
        self.samples = StepLog(run_folder / "samples.jsonl")
        self._attempts = StepLog(run_folder / "attempts.jsonl")
        self.checkpoints = CheckpointStore(run_folder / "checkpoints")
        self._identity, self._trainer, self._sync = identity, trainer, sync
        self._sampler, self._make_collector, self._evaluation = sampler, collector, evaluation
        self._mirror = mirror
        self.run_id = uuid4().hex
        self._processes, self._processes_file = processes, run_folder / "processes.json"
        self._collector: Collector | None = None
        self._position = DataPosition()
        self._rollout: Rollout | None = None
        self._row: dict[str, float] = {}
        self._saves = Saves(self.checkpoints, trainer, mirror, config.checkpoint)
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
        passed_over: list[str] = []
        ref = self.checkpoints.newest_intact(lambda error: passed_over.append(str(error)))
        step = 0
        if ref is not None:
            manifest = read_manifest(ref.path)
            check_continues(manifest.identity, self._identity, folder=ref.path)
            self._trainer.load(ref.path)
            if self._trainer.policy_version() != manifest.policy_version:
                raise CheckpointError(
                    f"{ref.path}: the trainer loaded policy version {self._trainer.policy_version()}, "
                    f"the manifest says {manifest.policy_version}"
                )
            step, self._position = ref.step, DataPosition(manifest.epoch, manifest.offset)
            self.run_id = manifest.run_id or self.run_id
            if self._mirror:
                self._mirror.send(ref)
        elif self.config.lora.start_from is not None:
            self._trainer.start_from(Path(self.config.lora.start_from))
        self.metrics.rewind(step)
        self.samples.rewind(step)
        self._collector = self._make_collector(self._position)
        started = datetime.now(UTC).isoformat(sep=" ", timespec="seconds")
        self._attempts.append(step, {"started": started, "changes": read_changes(self.run_folder)})
        path = ref.path if ref else None
        return Restored(step, self._trainer.policy_version(), path, tuple(passed_over))

    def sync(self) -> SyncReport:
        """Bring the engines to the trainer's policy and check that they run it."""
        started = time.perf_counter()
        report = self._sync.sync()
        # Engines are replaced while a run goes on; whoever looks after it finds the ones that live.
        self._processes_file.write_text(json.dumps(self._processes()) + "\n")
        self._row |= report.metrics() | {"seconds/sync": time.perf_counter() - started}
        return report

    def rollout(self, step: int) -> dict[str, float]:
        """Wait until the step's completions are generated."""
        assert self._collector is not None, "restore comes first"
        self._row["time/start"] = time.time()
        completions = self._collector.start(step).generated.result()
        return {"completions": completions}

    def score(self, step: int) -> dict[str, float]:
        """Wait until the step's completions are scored and enough groups can learn; start rollouts ahead."""
        assert self._collector is not None, "restore comes first"
        self._rollout = rollout = self._collector.finish(step)
        last = min(step + self.config.rollout.staleness, self.config.steps)
        for ahead in range(step + 1, last + 1):
            self._collector.start(ahead)
        metrics = rollout_metrics(rollout)
        seconds = {f"seconds/{phase}": value for phase, value in rollout.seconds.items()}
        self._row |= metrics | seconds
        self._row["rollout/tokens_per_second"] = metrics["rollout/tokens"] / max(rollout.seconds["generate"], 1e-9)
        return metrics

    def train(self, step: int) -> dict[str, float]:
        """Take the step's optimizer steps."""
        rollout, self._rollout = self._rollout, None
        assert rollout is not None, "score comes first"
        assert rollout.step == step
        self._unsaved_step, self._trains = None, True
        started = time.perf_counter()
        with self._sampler.engines_asleep() if self.config.engine.sleeps else nullcontext():
            metrics = learn(self._trainer, rollout, self.config)
        self._trains = False
        self._position = rollout.next_position
        self._row |= metrics | {"seconds/train": time.perf_counter() - started}
        self._row["policy_version"] = float(self._trainer.policy_version())
        self._log_samples(rollout)
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Answer the held-out prompts with the policy the engines serve."""
        if self._evaluation is None:
            return {}
        started = time.perf_counter()
        metrics = answer_held_out(self._sampler, self._evaluation, seed=self.config.seed)
        self._row |= metrics | {"seconds/evaluate": time.perf_counter() - started}
        return metrics

    def finish_step(self, step: int) -> dict[str, float]:
        """Write the step's row and return it.

        Raises:
            RunLockedError: Another attempt has taken the run: stop.
        """
        if self._mirror:
            self._mirror.check()
        row, self._row = self._row, {}
        started = row.pop("time/start", None)
        if started is not None:
            row["seconds/step"] = time.time() - started
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
        started = time.perf_counter()
        manifest = Manifest(
            run_name=self.config.run_name,
            step=step,
            policy_version=self._trainer.policy_version(),
            identity=self._identity,
            base_digest=self._identity.base_digest,
            epoch=self._position.epoch,
            offset=self._position.offset,
            run_id=self.run_id,
            layout=self.config.trainer.model_dump(),
        )
        self._saves.begin(manifest)
        self._row["seconds/save"] = time.perf_counter() - started
        behind = self.config.checkpoint.background and step < self.config.steps
        ref = None if behind else self.commit()
        self._unsaved_step = None
        return ref

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is begun that does not count yet."""
        return self._saves.is_writing

    def commit(self) -> CheckpointRef | None:
        """Wait until the checkpoint that was begun is written, and make it count; None if there is none.

        Raises:
            CheckpointError: It was not written; earlier checkpoints are as they were.
        """
        started = time.perf_counter()
        ref = self._saves.commit()
        if ref is not None:
            self._row["save/bytes"] = float(ref.num_bytes)
            self._row["seconds/save"] = self._row.get("seconds/save", 0.0) + time.perf_counter() - started
        return ref

    def save_unsaved(self) -> CheckpointRef | None:
        """Save the last finished step; None if it is saved, or an optimizer step has begun since."""
        return None if self._unsaved_step is None else self.save(self._unsaved_step) or self.commit()

    def wait_until_sent(self) -> None:
        """Wait until the last checkpoint is in its store, if there is one.

        Raises:
            PublishError: It is on this machine only.
        """
        if self._mirror:
            self._mirror.finish()

    def check_learned(self) -> None:
        """Refuse to call a run finished that never learned.

        Raises:
            TrainerError: No optimizer step was taken in the whole run.
        """
        if self._trainer.policy_version() == 0:
            raise TrainerError(
                f"no rollout of {self.config.steps} steps had a group to learn from: every completion of a prompt "
                "got the same reward; check rewards.scorers and labels, use easier prompts, or more "
                "rollout.completions_per_prompt"
            )

    def close(self) -> None:
        """Stop rollouts that run ahead, and end a save that was begun. Processes belong to whoever opened the session.

        A trainer in the middle of a step is not waited for: the save before is then the newest.
        """
        if self._collector is not None:
            self._collector.close()
        if not self._trains:
            self._saves.close()

    def _log_samples(self, rollout: Rollout) -> None:
        shown = [
            {
                "prompt": group.prompt.text,
                "completion": text,
                "label": group.prompt.label,
                "reward": score.value,
                "policy_version": completion.policy_version,
            }
            for group in rollout.drawn
            for text, score, completion in zip(group.texts[:1], group.scores, group.completions, strict=False)
        ]
        prompts = [group.prompt.index for group in rollout.groups]
        self.samples.append(
            rollout.step, {"trained_prompts": prompts, "samples": shown[: self.config.tracking.sample_completions]}
        )
