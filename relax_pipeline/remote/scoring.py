"""Score completions on CPU workers in parallel, so that no completion can hold up a step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from relax_pipeline.config import RewardsConfig
from relax_pipeline.errors import RewardError
from relax_pipeline.remote.host import Host, wait_any
from relax_pipeline.rewards.build import build_scorer
from relax_pipeline.rewards.limits import score_batch
from relax_pipeline.rewards.remote import RemoteScorer
from relax_pipeline.types import Score, ScoreRequest

_GRACE_SECONDS = 5.0
"""Beyond the time limit inside the worker, which cannot interrupt code that never returns to Python."""

_BATCH = 16
"""Completions in a call: enough that the call itself costs little."""

_TIMED_OUT = Score(0.0, timed_out=True)


class _Worker:
    def __init__(self, config: RewardsConfig) -> None:
        self._parts, self._limit = build_scorer(config).parts, config.time_limit_seconds

    def score(self, part: int, requests: Sequence[ScoreRequest]) -> list[Score]:
        return score_batch(self._parts[part].scorer, requests, time_limit_seconds=self._limit)


@dataclass(frozen=True, slots=True)
class _Job:
    """One call to a worker."""

    part: int
    indices: range
    seconds: float
    """Deadline; a worker that misses it is killed."""


class ScoringWorkers:
    """Scores on `config.workers` processes, in batches; an HTTP scorer gets all that a worker has in one."""

    def __init__(self, config: RewardsConfig, *, startup_timeout: float) -> None:
        self._config, self._startup_timeout = config, startup_timeout
        self._scorer = build_scorer(config)  # a wrong setting fails here, before any process starts
        self._hosts = [self._start() for _ in range(config.workers)]

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Return one score a request, in order; one that exceeds the time limit is 0 and marked.

        Raises:
            RewardError: A scorer failed, or an HTTP scorer gave no answer.
        """
        for host in self._hosts:
            host.pid(timeout=self._startup_timeout)
        columns: list[dict[int, Score]] = [{} for _ in self._scorer.parts]
        waiting, idle = self._jobs(len(requests))[::-1], list(self._hosts)
        running: dict[Any, tuple[Host, _Job, float]] = {}
        while waiting or running:
            while idle and waiting:
                host, job = idle.pop(), waiting.pop()
                call = host.submit("score", job.part, [requests[index] for index in job.indices])
                running[call] = host, job, time.monotonic() + job.seconds
            first_deadline = min(deadline for _, _, deadline in running.values())
            done = wait_any(list(running), timeout=max(0.0, first_deadline - time.monotonic()))
            late = [call for call, (_, _, deadline) in running.items() if deadline <= time.monotonic()]
            for call in done or late:
                host, job, _ = running.pop(call)
                if done:
                    answers = host.result(call, timeout=_GRACE_SECONDS)
                    columns[job.part].update(zip(job.indices, answers, strict=True))
                elif len(job.indices) == 1 and not self._is_remote(job.part):
                    columns[job.part][job.indices[0]] = _TIMED_OUT
                else:
                    waiting += self._one_by_one(job)
                idle.append(host if done else self._replace(host))
        return [self._scorer.combine([column[index] for column in columns]) for index in range(len(requests))]

    def close(self) -> None:
        """End the workers."""
        for host in self._hosts:
            host.kill()

    def _jobs(self, count: int) -> list[_Job]:
        """Split the work into batches small enough to keep all workers busy."""
        jobs = []
        for number, part in enumerate(self._scorer.parts):
            share = max(1, -(-count // len(self._hosts)))
            size, seconds = min(share, _BATCH), self._config.time_limit_seconds + _GRACE_SECONDS
            if isinstance(part.scorer, RemoteScorer):
                size, seconds = share, self._startup_timeout + _worst_case_seconds(part.scorer)
            jobs += [_Job(number, range(start, min(start + size, count)), seconds) for start in range(0, count, size)]
        return jobs

    def _one_by_one(self, job: _Job) -> list[_Job]:
        """Split a batch that hung, to find the completion it hung on. A service that hangs is no verdict on any.

        Raises:
            RewardError: The job was for an HTTP scorer.
        """
        scorer = self._scorer.parts[job.part].scorer
        if isinstance(scorer, RemoteScorer):
            raise RewardError(
                f"{scorer.url} gave no answer for {len(job.indices)} samples within {job.seconds:g} s; is it up?"
            )
        seconds = self._config.time_limit_seconds + _GRACE_SECONDS
        return [_Job(job.part, range(index, index + 1), seconds) for index in job.indices]

    def _is_remote(self, part: int) -> bool:
        return isinstance(self._scorer.parts[part].scorer, RemoteScorer)

    def _replace(self, host: Host) -> Host:
        host.kill()
        replacement = self._start()
        replacement.pid(timeout=self._startup_timeout)
        self._hosts[self._hosts.index(host)] = replacement
        return replacement

    def _start(self) -> Host:
        return Host(partial(_Worker, self._config), name="reward worker", error=RewardError)


def _worst_case_seconds(scorer: RemoteScorer) -> float:
    """Return how long a scorer may try before it fails by itself: all attempts, and the pauses between them."""
    return scorer.attempts * scorer.timeout_seconds + scorer.backoff_seconds * (2.0 ** (scorer.attempts - 1) - 1)
