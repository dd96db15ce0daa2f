"""An SGLang server as a child process: started, asked over HTTP, and ended with all of its own children."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from relax_pipeline.errors import EngineError

_LOG_LINES = 15
_WATCHED = 'exec 3<&0; (read _ <&3; kill -9 0) & exec "$@" </dev/null 3<&-'
"""Run a command in a process group that ends when our end of its standard input closes, however we die."""


class Server:
    """A running server. Safe to call from several threads.

    Attributes:
        pid: Leader of the server's process group.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        environment: Mapping[str, str],
        *,
        name: str,
        log: Path,
        timeout: float,
    ) -> None:
        """Start it and wait until it answers.

        Args:
            command: Makes the command line for a port.
            environment: Of the new process.
            name: For messages.
            log: File that gets all it prints.
            timeout: Seconds in which it must be up.

        Raises:
            EngineError: It ended, or did not come up in time; with the end of its log.
        """
        port = _free_port()
        self._name, self._log = name, log
        self._http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, limits=httpx.Limits(max_connections=None)
        )
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _WATCHED, "sglang", *command(port)],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._wait_until_up(timeout)

    def post(self, path: str, body: Mapping[str, Any], *, timeout: float) -> Any:
        """Send JSON, return JSON.

        Raises:
            EngineError: The server refused, broke the connection, or missed the deadline; with what it said.
        """
        return self._answer("POST", path, timeout=timeout, json=body)

    def get(self, path: str, *, timeout: float) -> Any:
        """Ask; raises as `post`."""
        return self._answer("GET", path, timeout=timeout)

    def stop(self) -> None:
        """End the server and its children at once; it would take seconds to drain."""
        self._http.close()
        if self._process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _answer(self, method: str, path: str, *, timeout: float, **options: Any) -> Any:
        try:
            response = self._http.request(method, path, timeout=timeout, **options)
        except httpx.TimeoutException as error:
            raise EngineError(f"{self._name} gave no answer to {path} within {timeout:g} s") from error
        except httpx.HTTPError as error:
            raise EngineError(f"{self._name} broke off {path}: {error}\n{self._last_lines()}") from error
        if response.status_code != httpx.codes.OK:
            raise EngineError(f"{self._name} refused {path} with {response.status_code}: {response.text[:2000]}")
        return response.json() if "json" in response.headers.get("content-type", "") else response.text

    def _wait_until_up(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            code = self._process.poll()
            if code is not None or time.monotonic() > deadline:
                happened = f"did not come up within {timeout:g} s" if code is None else f"ended with code {code}"
                self.stop()
                raise EngineError(f"{self._name} {happened}; its log {self._log} ends with\n{self._last_lines()}")
            try:
                if self._http.get("/health", timeout=5).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(0.1)

    def _last_lines(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:])


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
