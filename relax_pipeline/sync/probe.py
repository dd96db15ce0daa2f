"""Whether an engine computes what the trainer computes, shown on a few fixed token sequences."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from relax_pipeline.errors import SyncError, TrainerError
from relax_pipeline.rollout.base import Engine, EngineInfo
from relax_pipeline.trainer.base import Trainer
from relax_pipeline.types import TrainingSample

Logprobs = Sequence[NDArray[np.float32]]
_STANDARD_ERRORS = 4
_MEASURABLE = 0.25
"""A share is known when that many standard errors are at most this: then 0, the bare base, and 1 lie far apart."""
_ABOVE_NOISE = 2.0
"""And when the trainer moved that many times as far as the two differ in the base. Noise in what it moved makes the
share of a faithful engine smaller: at 2, to no less than 1 - 1 / 2² = 0.75."""
_FOLLOWS = 0.5


class Probe:
    """Holds what the trainer computes for each version, and what each engine computed before it was sent anything.

    The trainer computes in a thread of its own, while engines are sent the version; `check` waits for it.
    """

    def __init__(
        self, trainer: Trainer, sequences: Sequence[Sequence[int]], *, tolerance: float, timeout: float
    ) -> None:
        """Take the mean |difference| in nats that is no error, and the seconds that the trainer has for a version."""
        self._trainer, self._tolerance, self._timeout = trainer, tolerance, timeout
        self._sequences = [tuple(sequence) for sequence in sequences]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="probe")
        self._expected: dict[int, Future[Logprobs]] = {}
        self._bare: Future[Logprobs] | None = None
        self._deadline = 0.0
        self._engines_bare: dict[str, tuple[str, Logprobs]] = {}
        """By engine id: incarnation, and what that one computed."""

    def expects(self, version: int) -> bool:
        """Whether engines are compared at this version."""
        return version in self._expected

    def expect(self, version: int) -> None:
        """Begin to take the trainer's logprobs of its present version; it must stay there until `settle`."""
        self._deadline = time.monotonic() + self._timeout
        if self._bare is None and self._trainer.info().modules:
            self._bare = self._thread.submit(self._compute, adapter_enabled=False)
        self._expected[version] = self._thread.submit(self._compute, adapter_enabled=True)

    def settle(self) -> None:
        """Wait until the trainer has computed; raises what it raised, or TrainerError once its time is up."""
        for computed in (self._bare, *self._expected.values()):
            if computed is not None:
                self._wait(computed)

    def forget(self, version: int) -> None:
        """Drop what the trainer computed for a version."""
        self._expected.pop(version, None)

    def meet(self, engine: Engine, info: EngineInfo) -> None:
        """Take the logprobs of an engine that serves the bare base, once in its life."""
        met, _ = self._engines_bare.get(info.engine_id, (None, None))
        if met != info.incarnation:
            self._engines_bare[info.engine_id] = info.incarnation, engine.logprobs(self._sequences, version=None)

    def check(self, engine: Engine, info: EngineInfo, version: int) -> float:
        """Compare an engine with the trainer; return the mean |difference| in nats.

        Raises:
            SyncError: They differ by more than the tolerance; or the engine did not move away from the base as the
                trainer did; or version 0 is the trainer's base and not the engine's.
            TrainerError: The trainer's time is up.
        """
        answered, expected = engine.logprobs(self._sequences, version=version), self._wait(self._expected[version])
        _, bare = self._engines_bare[info.engine_id]
        difference = probe_difference(answered, expected)
        if difference > self._tolerance:
            raise SyncError(
                f"engine {info.engine_id} does not run version {version}: probe logprobs differ by {difference:.3g} "
                f"from the trainer's in the mean, sync.probe_tolerance is {self._tolerance:g}"
            )
        if self._bare is not None:
            trainer_bare = self._wait(self._bare)
            share = followed_share(bare, answered, trainer_bare, expected)
            if share is not None and share < _FOLLOWS:
                raise SyncError(
                    f"engine {info.engine_id} does not run version {version}: its probe logprobs made {share:.0%} of "
                    "the trainer's way from the base; the adapter, or a part of it, is not served"
                )
            # Unless it starts from an adapter, version 0 is the base.
            near = self._tolerance / 10
            if version == 0 and probe_difference(expected, trainer_bare) <= near < probe_difference(answered, bare):
                raise SyncError(f"engine {info.engine_id}: version 0 is not the base, though it is the trainer's")
        return difference

    def _wait(self, computed: Future[Logprobs]) -> Logprobs:
        try:
            return computed.result(max(0.0, self._deadline - time.monotonic()))
        except TimeoutError as error:
            raise TrainerError(
                f"the trainer has not computed the probe of a sync within {self._timeout:g} s: it hangs, or "
                "sync.timeout_seconds is too short for it"
            ) from error

    def _compute(self, *, adapter_enabled: bool) -> Logprobs:
        samples = [_probe_sample(sequence) for sequence in self._sequences]
        return self._trainer.logprobs(samples, temperature=1.0, adapter_enabled=adapter_enabled)


def probe_difference(ours: Logprobs, theirs: Logprobs) -> float:
    """Return the mean |difference| in nats; NaN anywhere gives infinity."""
    mean = float(np.abs(np.concatenate(ours) - np.concatenate(theirs)).mean())
    return mean if np.isfinite(mean) else float("inf")


def followed_share(
    engine_bare: Logprobs, engine_now: Logprobs, trainer_bare: Logprobs, trainer_now: Logprobs
) -> float | None:
    """Return how much of the trainer's way from its base an engine went: about 1; 0 for one that serves the base.

    It is the least-squares slope of the engine's changes over the trainer's, so the two may compute with different
    kernels: what differs in the base cancels. None where the trainer has hardly moved, so that noise would decide.
    """
    base = np.concatenate(trainer_bare).astype(np.float64)
    moved = np.concatenate(trainer_now) - base
    followed = np.concatenate(engine_now).astype(np.float64) - np.concatenate(engine_bare)
    noise = np.concatenate(engine_bare) - base
    squares = float(moved @ moved)
    if squares == 0.0 or squares < _ABOVE_NOISE**2 * float(noise @ noise):
        return None
    slope = float(followed @ moved) / squares
    residual = followed - slope * moved
    standard_error = float(np.sqrt(residual @ residual / max(1, len(moved) - 1) / squares))
    return slope if _STANDARD_ERRORS * standard_error <= _MEASURABLE else None


def _probe_sample(sequence: Sequence[int]) -> TrainingSample:
    """All tokens after the first, as a completion."""
    rest = np.array(sequence[1:], dtype=np.int64)
    return TrainingSample(
        prompt_ids=np.array(sequence[:1], dtype=np.int64),
        completion_ids=rest,
        loss_mask=np.ones(len(rest), dtype=bool),
        rollout_logprobs=np.zeros(len(rest), dtype=np.float32),
        advantage=0.0,
        policy_version=0,
    )
