"""Reward workers: no completion and no service can hold up a step or fake a score."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from relax_pipeline.config import RewardsConfig
from relax_pipeline.errors import RewardError
from relax_pipeline.remote.scoring import ScoringWorkers
from relax_pipeline.types import Score, ScoreRequest

pytestmark = pytest.mark.usefixtures("ray_local")

SCRIPTED = {"kind": "python:hosted.scripted"}


@pytest.fixture(scope="module")
def workers() -> Iterator[Callable[..., ScoringWorkers]]:
    opened = []

    def start(*scorers: dict[str, Any], seconds: float = 1.0, startup: float = 60.0, count: int = 2) -> ScoringWorkers:
        config = {"scorers": scorers, "workers": count, "time_limit_seconds": seconds}
        opened.append(ScoringWorkers(RewardsConfig.model_validate(config), startup_timeout=startup))
        return opened[-1]

    yield start
    for item in opened:
        item.close()


@pytest.fixture(scope="module")
def scripted(workers: Callable[..., ScoringWorkers]) -> ScoringWorkers:
    return workers(SCRIPTED)


def requests(*completions: str, label: str = "") -> list[ScoreRequest]:
    return [ScoreRequest("1+1=", completion, label) for completion in completions]


def test_scores_come_back_in_order(scripted: ScoringWorkers) -> None:
    scores = scripted.score(requests(*(str(number) for number in range(40))))
    assert [score.value for score in scores] == list(range(40))


def test_nothing_to_score_is_no_score(scripted: ScoringWorkers) -> None:
    assert scripted.score([]) == []


def test_endless_loop_scores_zero_and_is_marked(scripted: ScoringWorkers) -> None:
    started = time.monotonic()
    scores = scripted.score(requests("1", "loop", "2", "3", "loop", "4"))
    assert [score.value for score in scores] == [1, 0, 2, 3, 0, 4]
    assert [score.timed_out for score in scores] == [False, True, False, False, True, False]
    assert time.monotonic() - started < 5


def test_code_that_no_signal_stops_is_killed_from_outside(scripted: ScoringWorkers) -> None:
    scores = scripted.score(requests("1", "stuck", *["2"] * 20))
    assert [score.value for score in scores] == [1, 0, *[2] * 20]
    assert [place for place, score in enumerate(scores) if score.timed_out] == [1]
    assert scripted.score(requests("5", "6"))[1] == Score(6.0)


def test_worker_that_dies_is_an_error(workers: Callable[..., ScoringWorkers]) -> None:
    with pytest.raises(RewardError, match=r"^reward worker died: "):
        workers(SCRIPTED, count=1).score(requests("crash"))


def test_scorer_that_raises_is_an_error(scripted: ScoringWorkers) -> None:
    with pytest.raises(RewardError, match=r"ValueError: could not convert string to float: 'x'"):
        scripted.score(requests("1", "x"))


def test_each_part_of_a_sum_has_the_whole_limit_and_parts_add_up(workers: Callable[..., ScoringWorkers]) -> None:
    both = workers(SCRIPTED | {"weight": 0.5}, {"kind": "exact", "weight": 2.0}, count=1)
    scores = both.score(requests("3", "loop", "4", label="4"))
    assert [score.value for score in scores] == [1.5, 0.0, 4.0]
    assert [score.timed_out for score in scores] == [False, True, False]
    assert scores[2].metrics == {"accuracy": 1.0}


def test_unknown_scorer_is_refused_before_any_process_starts() -> None:
    with pytest.raises(RewardError, match="unknown scorer 'exakt'; did you mean exact"):
        ScoringWorkers(RewardsConfig.model_validate({"scorers": [{"kind": "exakt"}]}), startup_timeout=1)


# --- An HTTP scorer ---


class Service(ThreadingHTTPServer):
    """Scores a completion by its length, as slowly as told, and notes the samples of each call."""

    daemon_threads = True

    def __init__(self) -> None:
        self.delay, self.pause_between_bytes, self.calls = 0.0, 0.0, list[int]()
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        samples = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["samples"]
        self.server.calls.append(len(samples))
        time.sleep(self.server.delay)
        body = json.dumps({"padding": " " * 50, "scores": [len(sample["completion"]) for sample in samples]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        for byte in body:
            time.sleep(self.server.pause_between_bytes)
            self.wfile.write(bytes([byte]))

    def log_message(self, *_: object) -> None:
        """Keep the output of the tests clean."""


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def remote(service: Service, **options: float) -> dict[str, Any]:
    url = f"http://127.0.0.1:{service.server_address[1]}"
    return {"kind": "remote", "options": {"url": url, "attempts": 1, **options}}


def test_service_gets_one_call_a_worker(workers: Callable[..., ScoringWorkers], service: Service) -> None:
    scores = workers(remote(service)).score(requests("a", "bbb", "cc", "", "dddd"))
    assert [score.value for score in scores] == [1, 3, 2, 0, 4]
    assert sorted(service.calls) == [2, 3]


def test_service_has_its_own_time_not_the_limit_of_a_completion(
    workers: Callable[..., ScoringWorkers], service: Service
) -> None:
    service.delay = 2.0
    scores = workers(remote(service, timeout_seconds=20), seconds=0.1, count=1).score(requests("a", "bbb"))
    assert scores == [Score(1.0), Score(3.0)]


def test_slow_service_is_an_error_and_not_a_zero(workers: Callable[..., ScoringWorkers], service: Service) -> None:
    service.delay = 30.0
    with pytest.raises(RewardError, match=r"failed 2 times, at last with ReadTimeout"):
        workers(remote(service, timeout_seconds=0.2, attempts=2, backoff_seconds=0.1)).score(requests("a", "bbb"))


def test_service_that_trickles_its_answer_is_an_error_and_not_a_zero(
    workers: Callable[..., ScoringWorkers], service: Service
) -> None:
    service.pause_between_bytes = 0.1
    trickled = workers(remote(service, timeout_seconds=0.5), count=1)
    trickled.score([])  # waits for the process
    trickled._startup_timeout = 1.0
    with pytest.raises(RewardError, match=r"gave no answer for 2 samples within 1\.5 s; is it up\?"):
        trickled.score(requests("a" * 100, "b" * 1000))


def test_completion_that_hangs_does_not_take_the_service_with_it(
    workers: Callable[..., ScoringWorkers], service: Service
) -> None:
    scores = workers(SCRIPTED, remote(service)).score(requests("100", "loop", "20"))
    assert [score.value for score in scores] == [103.0, 0.0, 22.0]
    assert [score.timed_out for score in scores] == [False, True, False]
