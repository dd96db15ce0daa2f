"""Score completions on CPU workers in parallel, so that no completion can hold up a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from relax_pipeline.config import RewardsConfig
from relax_pipeline.errors import RewardError
from relax_pipeline.remote.host import Host, wait_any
from relax_pipeline.rewards.base import BatchScorer
from relax_pipeline.rewards.build import build_scorer
from relax_pipeline.rewards.limits import score_batch
from relax_pipeline.types import Score, ScoreRequest

_GRACE_SECONDS = 5.0
"""Beyond the time limit inside the worker, which cannot interrupt code that never returns to Python."""


_TIMED_OUT = Score(0.0, timed_out=True)


class _Worker:
    def __init__(self, config: RewardsConfig) -> None:
        self._scorer, self._limit = build_scorer(config), config.time_limit_seconds

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        return score_batch(self._scorer, requests, time_limit_seconds=self._limit)


class ScoringWorkers:
    """Scores on `config.workers` processes, one completion a call unless a scorer wants them in batches."""

    def __init__(self, config: RewardsConfig, *, startup_timeout: float) -> None:
        self._config, self._startup_timeout = config, startup_timeout
        scorer = build_scorer(config)  # a wrong setting fails here, before any process starts
        self._batched = any(isinstance(part.scorer, BatchScorer) for part in scorer.parts)
        self._hosts = [self._start() for _ in range(config.workers)]

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Return one score a request, in order; one that exceeds the time limit is 0 and marked.

        Raises:
            RewardError: A scorer failed.
        """
        for host in self._hosts:
            host.pid(timeout=self._startup_timeout)
        size = -(-len(requests) // len(self._hosts)) if self._batched else 1
        waiting = [range(start, min(start + size, len(requests))) for start in range(0, len(requests), size)][::-1]
        deadline = self._config.time_limit_seconds * size + _GRACE_SECONDS
        scores: dict[int, Score] = {}
        idle, running = list(self._hosts), dict[Any, tuple[Host, range]]()
        while len(scores) < len(requests):
            while idle and waiting:
                host, indices = idle.pop(), waiting.pop()
                running[host.submit("score", [requests[index] for index in indices])] = (host, indices)
            done = wait_any(list(running), timeout=deadline)
            for reference in done or list(running):  # none done: each has run for the whole deadline
                host, indices = running.pop(reference)
                answers = host.result(reference, timeout=_GRACE_SECONDS) if done else [_TIMED_OUT] * len(indices)
                scores.update(zip(indices, answers, strict=True))
                idle.append(host if done else self._replace(host))
        return [scores[index] for index in range(len(requests))]

    def close(self) -> None:
        """End the workers."""
        for host in self._hosts:
            host.kill()

    def _replace(self, host: Host) -> Host:
        host.kill()
        replacement = self._start()
        replacement.pid(timeout=self._startup_timeout)
        self._hosts[self._hosts.index(host)] = replacement
        return replacement

    def _start(self) -> Host:
        return Host(partial(_Worker, self._config), name="reward worker", error=RewardError)
