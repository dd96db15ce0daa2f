"""A Prefect server for one command: started where none is configured, reachable in a browser, gone afterwards."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, PREFECT_SERVER_API_PORT, temporary_settings

from relax_pipeline.errors import ConfigError

_STARTUP_SECONDS = 180
_FLUSH_SECONDS = 5
_SERVER_SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    # One transaction for many states of tasks, not for each: three fifths less CPU, taken from trainer and engines.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "20",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
}
_PR_SET_PDEATHSIG = 1


@contextmanager
def prefect_server() -> Iterator[str]:
    """Yield the API's address: the configured one, or that of a server of this process's own.

    Raises:
        ConfigError: The server did not come up; names its log.
    """
    configured = PREFECT_API_URL.value()
    if configured:
        yield configured
        return
    port = _free_port()
    url = f"http://127.0.0.1:{port}/api"
    log_file = Path(PREFECT_HOME.value()).expanduser() / "relax-pipeline-server.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with log_file.open("w") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_SERVER_SETTINGS | {"PREFECT_SERVER_UI_API_URL": url} | os.environ,
            start_new_session=True,
            preexec_fn=_end_with_parent,  # noqa: PLW1509 - one system call, which takes no lock
        )
    try:
        _wait_until_up(url, process, log_file)
        with temporary_settings({PREFECT_API_URL: url}):
            try:
                yield url
            finally:
                _flush()
    finally:
        _stop(process)


def _wait_until_up(url: str, process: subprocess.Popen[bytes], log_file: Path) -> None:
    deadline = time.monotonic() + _STARTUP_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=2).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise ConfigError(
        f"the local Prefect server did not start; see {log_file}, or set PREFECT_API_URL to one that runs"
    )


def _flush() -> None:
    """Send what is queued while there is somebody to send it to; otherwise exit waits for a server that is gone."""
    APILogWorker.drain_all(timeout=_FLUSH_SECONDS)
    EventsWorker.drain_all(timeout=_FLUSH_SECONDS)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _end_with_parent() -> None:
    """Ask the kernel to end the server when this process dies, even by SIGKILL. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_port() -> int:
    """Return the port of Prefect's settings, usually 4200, where it is free; else any."""
    for port in (PREFECT_SERVER_API_PORT.value(), 0):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            bound: int = probe.getsockname()[1]
            return bound
    raise ConfigError("no free port on 127.0.0.1 for the local Prefect server")
