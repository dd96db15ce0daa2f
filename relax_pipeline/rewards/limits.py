"""Scoring a batch, each completion under a time limit."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from relax_pipeline.rewards.base import BatchScorer, Scorer, score_one
from relax_pipeline.rewards.weighted import WeightedSum
from relax_pipeline.types import Score, ScoreRequest

_REPEAT_SECONDS = 1.0
"""After the limit the alarm rings again and again, for scorers that swallow exceptions."""


class TimeUp(BaseException):
    """The time limit has passed. Not an Exception: parsers that try one syntax after another would swallow it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeUp in the body once the wall time has passed, and give an alarm that was already set its turn.

    Interrupts by a signal, so neither off the main thread nor in C code that does not return: there the caller has to
    kill the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise TimeUp

    start = time.monotonic()
    outer_handler = signal.signal(signal.SIGALRM, ring)
    outer_left, outer_interval = signal.setitimer(signal.ITIMER_REAL, seconds, _REPEAT_SECONDS)
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:  # Apart, because the alarm can still ring in the line above.
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, outer_handler)
        if outer_left:
            left = max(outer_left - (time.monotonic() - start), 1e-6)
            signal.setitimer(signal.ITIMER_REAL, left, outer_interval)


def score_batch(scorer: Scorer, requests: Sequence[ScoreRequest], *, time_limit_seconds: float) -> list[Score]:
    """Score each completion, in order; one that takes longer than the limit gets 0 and is marked timed out.

    Each part of a weighted sum has the whole limit. Scorers that take a batch get it whole and limit themselves.

    Raises:
        RewardError: A scorer breaks its contract.
    """
    if isinstance(scorer, WeightedSum):
        columns = [score_batch(part.scorer, requests, time_limit_seconds=time_limit_seconds) for part in scorer.parts]
        return [scorer.combine(row) for row in zip(*columns, strict=True)]
    if isinstance(scorer, BatchScorer):
        return scorer.score_many(requests)
    return [_score_limited(scorer, request, time_limit_seconds) for request in requests]


def _score_limited(scorer: Scorer, request: ScoreRequest, seconds: float) -> Score:
    start = time.monotonic()
    with suppress(TimeUp), time_limit(seconds):
        score = score_one(scorer, request)
        if time.monotonic() - start <= seconds:  # Else it may have swallowed the alarm.
            return score
    return Score(0.0, timed_out=True)
