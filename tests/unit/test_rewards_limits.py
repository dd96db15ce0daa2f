from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from relax_pipeline.config import RewardsConfig
from relax_pipeline.errors import RewardError
from relax_pipeline.rewards import limits
from relax_pipeline.rewards.build import build_scorer
from relax_pipeline.rewards.limits import score_batch, time_limit
from relax_pipeline.rewards.weighted import Part, WeightedSum
from relax_pipeline.types import Score, ScoreRequest

TIMED_OUT = Score(0.0, timed_out=True)


def requests(*completions: str) -> list[ScoreRequest]:
    return [ScoreRequest(prompt="", completion=completion, label="5") for completion in completions]


def slow_on_slow(request: ScoreRequest) -> Score:
    if request.completion == "slow":
        time.sleep(10)
    return Score(1.0)


def swallows_the_alarm(request: ScoreRequest) -> Score:
    try:
        time.sleep(10)
    except BaseException:  # noqa: BLE001  what a careless parser does
        return Score(1.0)
    return Score(2.0)


class Doubles:
    """A batch scorer that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, request: ScoreRequest) -> Score:
        return self.score_many([request])[0]

    def score_many(self, requests: list[ScoreRequest]) -> list[Score]:
        self.calls += 1
        return [Score(2.0 * float(request.completion)) for request in requests]


def test_a_slow_completion_gets_zero_and_the_others_their_score() -> None:
    scored = score_batch(slow_on_slow, requests("a", "slow", "b"), time_limit_seconds=0.1)
    assert scored == [Score(1.0), TIMED_OUT, Score(1.0)]


def test_a_score_given_after_the_limit_does_not_count() -> None:
    assert score_batch(swallows_the_alarm, requests("a"), time_limit_seconds=0.1) == [TIMED_OUT]


def test_a_scorer_that_swallows_the_alarm_and_goes_on_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def goes_on(request: ScoreRequest) -> Score:
        swallows_the_alarm(request)
        return slow_on_slow(request)

    monkeypatch.setattr(limits, "_REPEAT_SECONDS", 0.1)
    assert score_batch(goes_on, requests("slow"), time_limit_seconds=0.1) == [TIMED_OUT]


def test_math_that_takes_for_ever_is_stopped() -> None:
    scorer = build_scorer(RewardsConfig())
    assert score_batch(scorer, requests("$9^{9^{9^{9}}}$", "5"), time_limit_seconds=0.5) == [
        TIMED_OUT,
        Score(1.0, {"accuracy": 1.0}),
    ]


def test_a_batch_scorer_gets_the_batch_in_one_call() -> None:
    scorer = Doubles()
    assert score_batch(scorer, requests("1", "3"), time_limit_seconds=1) == [Score(2.0), Score(6.0)]
    assert scorer.calls == 1


def test_a_sum_batches_the_parts_that_can() -> None:
    doubles = Doubles()
    scorer = WeightedSum((Part("doubles", 0.5, doubles), Part("one", 10.0, slow_on_slow)))
    assert score_batch(scorer, requests("1", "3"), time_limit_seconds=1) == [Score(11.0), Score(13.0)]
    assert doubles.calls == 1


def test_a_sum_is_zero_where_a_part_timed_out() -> None:
    scorer = WeightedSum((Part("one", 1.0, lambda _: Score(1.0)), Part("slow", 1.0, slow_on_slow)))
    assert score_batch(scorer, requests("slow", "a"), time_limit_seconds=0.1) == [TIMED_OUT, Score(2.0)]


def test_a_raising_scorer_stops_the_batch() -> None:
    with pytest.raises(RewardError, match="raised ValueError"):
        score_batch(lambda request: Score(float(request.completion)), requests("1", "x"), time_limit_seconds=1)


def test_off_the_main_thread_a_late_score_is_still_marked() -> None:
    def late(_: ScoreRequest) -> Score:
        time.sleep(0.1)
        return Score(1.0)

    scored: list[Score] = []
    thread = threading.Thread(target=lambda: scored.extend(score_batch(late, requests("a"), time_limit_seconds=0.05)))
    thread.start()
    thread.join()
    assert scored == [TIMED_OUT]


@pytest.fixture
def outer_alarm() -> Iterator[Callable[[], float]]:
    """Set an alarm of 5 s; the function returned says how much of it is left."""

    def ring(*_: object) -> None:
        raise TimeoutError("outer")

    handler = signal.signal(signal.SIGALRM, ring)
    timer = signal.setitimer(signal.ITIMER_REAL, 5)
    yield lambda: signal.getitimer(signal.ITIMER_REAL)[0]
    signal.setitimer(signal.ITIMER_REAL, *timer)
    signal.signal(signal.SIGALRM, handler)


def test_an_outer_alarm_goes_on_where_it_was(outer_alarm: Callable[[], float]) -> None:
    with time_limit(1):
        time.sleep(0.2)
    assert 4 < outer_alarm() <= 4.8


@pytest.mark.usefixtures("outer_alarm")
def test_an_outer_alarm_that_came_due_meanwhile_rings() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with pytest.raises(TimeoutError, match="outer"):  # noqa: PT012
        with time_limit(1):
            time.sleep(0.2)
        time.sleep(1)
