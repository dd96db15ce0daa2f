"""Prove, without a training run, that what the trainer holds is what the engines serve; and say what a sync costs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from relax_pipeline.config import RunConfig
from relax_pipeline.errors import SyncError
from relax_pipeline.inputs import check_backends, check_model_folder, run_folder
from relax_pipeline.processes import Processes, open_cluster, open_processes, probe_tolerance
from relax_pipeline.sync.probe import probe_difference
from relax_pipeline.sync.report import SyncReport
from relax_pipeline.trainer.base import Trainer
from relax_pipeline.types import TrainingSample

Mode = Literal["adapter", "merge"]
_PROBES = ((48, 0), (17, 1))
"""(length, seed) of the sequences on which trainer and engines are compared."""


@dataclass(frozen=True, slots=True)
class CheckedSync:
    """One sync that was checked."""

    report: SyncReport
    moved: float
    """Mean |logprob| difference to the base, in nats: how far wrong an engine would be that still serves it."""
    failure: str | None
    """Why it is not good; None: it is."""


def sync_modes(config: RunConfig) -> list[Mode]:
    """Return the modes in which this run could sync."""
    if not config.lora.enabled:
        return ["merge"]
    return ["adapter"] if "router" in config.lora.target_modules else ["adapter", "merge"]


def check_sync(config: RunConfig, mode: Mode) -> Iterator[CheckedSync]:
    """Start trainer and engines; sync the base as version 0, then a random policy far from it as version 1.

    Raises:
        RelaxError: Something could not be started, or no engine holds what it was sent; says why.
    """
    check_backends(config)
    check_model_folder(config)
    checked = for_check(config, mode)
    folder = run_folder(checked)
    folder.mkdir(parents=True, exist_ok=True)
    with open_cluster(checked), open_processes(checked, folder, probe=probe_sequences(checked)) as processes:
        yield from _check(checked, processes)


def for_check(config: RunConfig, mode: Mode) -> RunConfig:
    """Return the run's configuration with steps so large that one of them shows, and a folder of its own."""
    values = config.model_dump()
    values["run_name"] = f"{config.run_name}-sync-check"
    values["sync"] |= {"mode": mode, "verify": True, "verify_every": 1}
    values["optimizer"] |= {"learning_rate": 1e-2 if config.lora.enabled else 1e-4, "warmup_steps": 0}
    values["algorithm"] |= {"kl_coef": 0.0}
    return RunConfig.model_validate(values)


def probe_sequences(config: RunConfig) -> list[tuple[int, ...]]:
    """Return random token sequences of the model's vocabulary."""
    limit = _vocabulary(Path(config.model.path))
    return [tuple(np.random.default_rng(seed).integers(0, limit, length).tolist()) for length, seed in _PROBES]


def take_random_step(trainer: Trainer, config: RunConfig) -> None:
    """Train one step on random tokens."""
    draw = np.random.default_rng(trainer.policy_version())
    limit = _vocabulary(Path(config.model.path))
    samples = [_random_sample(draw, limit, advantage=(-1.0) ** place) for place in range(4)]
    logprobs = trainer.logprobs(samples, temperature=1.0)
    samples = [replace(s, rollout_logprobs=values) for s, values in zip(samples, logprobs, strict=True)]
    trainer.forward_backward(samples, temperature=1.0)
    trainer.optim_step()


def _check(config: RunConfig, processes: Processes) -> Iterator[CheckedSync]:
    probe, tolerance = probe_sequences(config), probe_tolerance(config)
    report = processes.sync.sync()
    base = processes.pool.ready()[0].engine.logprobs(probe, version=0)
    yield CheckedSync(report, 0.0, _failure(report))
    take_random_step(processes.trainer, config)
    report = processes.sync.sync()
    ready = processes.pool.ready()
    moved = min(probe_difference(slot.engine.logprobs(probe, version=1), base) for slot in ready)
    failure = _failure(report)
    if failure is None and moved <= tolerance:
        failure = (
            f"version 1 differs from the base by {moved:.3g} nats only, and sync.probe_tolerance is {tolerance:g}: "
            "the check proves nothing; lower sync.probe_tolerance"
        )
    yield CheckedSync(report, moved, failure)


def _failure(report: SyncReport) -> str | None:
    return "; ".join(f"engine {index}: {reason}" for index, reason in report.quarantined.items()) or None


def _random_sample(draw: np.random.Generator, limit: int, *, advantage: float) -> TrainingSample:
    return TrainingSample(
        prompt_ids=draw.integers(0, limit, 8),
        completion_ids=draw.integers(0, limit, 24),
        loss_mask=np.ones(24, dtype=bool),
        rollout_logprobs=np.zeros(24, dtype=np.float32),
        advantage=advantage,
        policy_version=0,
    )


def _vocabulary(folder: Path) -> int:
    """Return the number of token ids the model knows.

    Raises:
        SyncError: config.json does not say.
    """
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    size = values.get("vocab_size") or values.get("text_config", {}).get("vocab_size")
    if not size:
        raise SyncError(f"{folder / 'config.json'} names no vocab_size, so no random tokens can be drawn")
    return int(size)
