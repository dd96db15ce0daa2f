from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import date
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from relax_pipeline.errors import RewardError
from relax_pipeline.rewards.remote import RemoteScorer
from relax_pipeline.types import Score, ScoreRequest

REQUESTS = [
    ScoreRequest("2+3=", "5", "5", {"level": 1}),
    ScoreRequest("2+4=", "7 \ud800", "6", {"day": date(2025, 3, 1)}),
]


class Service(HTTPServer):
    """Gives the answers of `script` in order; keeps what it was sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[tuple[int, str]] = []
        self.received: list[Any] = []

    def scorer(self) -> RemoteScorer:
        return RemoteScorer(url=f"http://127.0.0.1:{self.server_port}/score", attempts=3, backoff_seconds=0.01)


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        self.server.received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        status, body = self.server.script[len(self.server.received) - 1]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_batch_is_one_call(service: Service) -> None:
    service.script = [(200, '{"scores": [1, {"value": -0.5, "metrics": {"style": 0.25}}]}')]
    assert service.scorer().score_many(REQUESTS) == [Score(1.0), Score(-0.5, {"style": 0.25})]
    assert service.received == [
        {
            "samples": [
                {"prompt": "2+3=", "completion": "5", "label": "5", "metadata": {"level": 1}},
                {"prompt": "2+4=", "completion": "7 \ud800", "label": "6", "metadata": {"day": "2025-03-01"}},
            ]
        }
    ]


def test_one_completion(service: Service) -> None:
    service.script = [(200, '{"scores": [0.75]}')]
    assert service.scorer()(REQUESTS[0]) == Score(0.75)


def test_nothing_to_score_is_no_call(service: Service) -> None:
    assert service.scorer().score_many([]) == []
    assert service.received == []


def test_server_errors_are_tried_again(service: Service) -> None:
    service.script = [(503, "busy"), (500, "oops"), (200, '{"scores": [0.5, 0.25]}')]
    assert service.scorer().score_many(REQUESTS) == [Score(0.5), Score(0.25)]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([(503, "busy")] * 3, "failed 3 times, at last with status 503: 'busy'"),
        ([(422, "no label")], "refused the samples with status 422: 'no label'"),
        ([(307, "")], "refused the samples with status 307"),
        ([(200, '{"scores": [1]}')], "answered 1 scores for 2 samples"),
        ([(200, '{"scores": [1, NaN]}')], "all finite"),
        ([(200, '{"scores": [1, {"value": Infinity}]}')], "all finite"),
        ([(200, '{"scores": [1, {"value": 1, "metrics": {"style": NaN}}]}')], "all finite"),
        ([(200, '{"scores": [1, "0.5"]}')], "must answer"),
        ([(200, '{"rewards": [1, 2]}')], "must answer"),
        ([(200, "<html>")], "must answer"),
    ],
)
def test_bad_answers_are_errors(service: Service, script: list[tuple[int, str]], message: str) -> None:
    service.script = script
    with pytest.raises(RewardError, match=message):
        service.scorer().score_many(REQUESTS)
    assert len(service.received) == len(script)


def test_an_unreachable_service_is_an_error() -> None:
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        port = server.server_port
    with pytest.raises(RewardError, match=r"failed 2 times, at last with ConnectError.*is the service up"):
        RemoteScorer(url=f"http://127.0.0.1:{port}", attempts=2, backoff_seconds=0.01)(REQUESTS[0])
