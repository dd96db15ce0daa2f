"""An HTTP proxy in front of a store that fails on command: what a bad network and a busy store do to a client."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Fault = Literal[
    "delay",  # answer late
    "reset",  # drop the connection before the store hears of the request
    "lost_answer",  # the store does it, the answer never arrives
    "cut_answer",  # the answer breaks off half-way
    "slow_down",  # 503
    "expired",  # 400 ExpiredToken
    "denied",  # 403
    "not_implemented",  # 501
    "corrupt",  # the store is given half of what was sent, and says all is well
]

_REFUSALS: dict[str, tuple[int, str]] = {
    "slow_down": (503, "SlowDown"),
    "expired": (400, "ExpiredToken"),
    "denied": (403, "AccessDenied"),
    "not_implemented": (501, "NotImplemented"),
}


def _error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>as told</Message></Error>".encode()


@dataclass(frozen=True)
class Call:
    """One request, counted from 0."""

    number: int
    method: str
    path: str
    """With query."""
    headers: dict[str, str]


class FaultProxy:
    """`fault` decides what goes wrong with each call; `after` runs when the store has answered one."""

    def __init__(self, target: str) -> None:
        self.target = target.removeprefix("http://")
        self.calls: list[Call] = []
        self.fault: Callable[[Call], Fault | None] = lambda call: None
        self.after: Callable[[Call], None] = lambda call: None
        self.errors: list[Exception] = []
        """What `fault` or `after` raised."""
        self.url = ""
        self._lock = threading.Lock()

    def reset(self) -> None:
        """Count from 0 again and do no harm."""
        self.calls, self.fault, self.after = [], lambda call: None, lambda call: None

    def next_call(self, method: str, path: str, headers: dict[str, str]) -> Call:
        with self._lock:
            call = Call(len(self.calls), method, path, headers)
            self.calls.append(call)
        return call

    @contextmanager
    def running(self) -> Iterator[FaultProxy]:
        """Serve in a thread; `url` is where."""
        server = _Server(("127.0.0.1", 0), _Handler)
        server.proxy = self
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()
        if self.errors:
            raise ExceptionGroup("in the proxy", self.errors)


class _Server(ThreadingHTTPServer):
    proxy: FaultProxy
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are part of the game."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
        proxy = self.server.proxy
        call = proxy.next_call(self.command, self.path, headers)
        try:
            self._serve(proxy, call, body)
        except OSError:
            self._drop()
        except Exception as error:  # noqa: BLE001 - reported by running()
            proxy.errors.append(error)
            self._drop()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _serve(self, proxy: FaultProxy, call: Call, body: bytes) -> None:
        fault = proxy.fault(call)
        if fault == "delay":
            time.sleep(0.1)
        if fault == "reset":
            return self._drop()
        if fault in _REFUSALS:
            status, code = _REFUSALS[fault]
            return self._answer(status, {"Content-Type": "application/xml"}, _error(code))
        status, headers, answer = self._forward(
            proxy.target, call, body[: len(body) // 2] if fault == "corrupt" else body
        )
        proxy.after(call)
        if fault == "lost_answer":
            return self._drop()
        return self._answer(status, headers, answer, cut=fault == "cut_answer")

    def _forward(self, target: str, call: Call, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(target, timeout=30)
        headers = {**call.headers, "Content-Length": str(len(body))}
        connection.request(call.method, call.path, body, headers)
        response = connection.getresponse()
        answer = response.read()
        connection.close()
        if response.status == 500 and "uploadId=" in call.path:
            # moto breaks where S3 says that it knows no such upload.
            return 404, {"Content-Type": "application/xml"}, _error("NoSuchUpload")
        return response.status, dict(response.getheaders()), answer

    def _answer(self, status: int, headers: dict[str, str], body: bytes, *, cut: bool = False) -> None:
        headers = {
            name: value for name, value in headers.items() if name.lower() not in ("connection", "server", "date")
        }
        if self.command != "HEAD":
            headers = {name: value for name, value in headers.items() if name.lower() != "transfer-encoding"}
            headers["Content-Length"] = str(len(body))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self._drop()

    def _drop(self) -> None:
        """Close so that the other side sees a reset."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
