"""The child process round a server: started, watched, ended. A small HTTP server stands where SGLang would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_pipeline.errors import EngineError
from relax_pipeline.rollout.sglang.server import Server

HTTP = """
import http.server, json, os, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self):
        if self.path == "/slow": time.sleep(600)
        if self.path == "/die": print("out of memory", flush=True); os._exit(1)
        self.send_response(400 if self.path == "/refuse" else 200)
        self.send_header("content-type", "application/json"); self.end_headers()
        self.wfile.write(json.dumps({"child": child.pid}).encode())
    do_GET = do_POST = reply
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
OWNER = """
import os, sys; from pathlib import Path; from relax_pipeline.rollout.sglang.server import Server
command = [sys.executable, "-c", sys.argv[1]]
server = Server(lambda port: [*command, str(port)], os.environ, name="s", log=Path(sys.argv[2]), timeout=30)
print(server.pid, server.get("/", timeout=5)["child"], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[[str], Server]:
    def make(code: str) -> Server:
        command = [sys.executable, "-c", code]
        return Server(
            lambda port: [*command, str(port)], os.environ, name="engine x", log=tmp_path / "logs" / "log", timeout=20
        )

    return make


def gone(pid: int) -> bool:
    """Whether a process ends within five seconds; one that nobody has waited for counts as ended."""
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def test_stop_ends_the_server_and_its_children(start: Callable[[str], Server]) -> None:
    server = start(HTTP)
    child = server.get("/", timeout=5)["child"]
    server.stop()
    assert gone(server.pid)
    assert gone(child)


def test_server_dies_with_its_owner_however_that_dies(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, HTTP, str(tmp_path / "log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    assert owner.stdin is not None
    pids = [int(word) for word in owner.stdout.readline().split()]
    owner.kill()
    owner.wait()
    assert [gone(pid) for pid in pids] == [True, True]
    owner.stdin.close()
    owner.stdout.close()


def test_server_that_ends_at_its_start_says_why(start: Callable[[str], Server]) -> None:
    with pytest.raises(EngineError, match=r"(?s)engine x ended with code 3; its log .* ends with\n.*no such model"):
        start("import sys; print('no such model'); sys.exit(3)")


def test_refusal_carries_the_answer(start: Callable[[str], Server]) -> None:
    server = start(HTTP)
    with pytest.raises(EngineError, match=r'engine x refused /refuse with 400: \{"child"'):
        server.post("/refuse", {}, timeout=5)
    server.stop()


def test_server_that_dies_under_a_request_says_its_last_words(start: Callable[[str], Server]) -> None:
    server = start(HTTP)
    with pytest.raises(EngineError, match=r"(?s)engine x broke off /die: .*out of memory"):
        server.post("/die", {}, timeout=5)
    server.stop()


def test_silence_ends_at_the_deadline(start: Callable[[str], Server]) -> None:
    server = start(HTTP)
    with pytest.raises(EngineError, match=r"engine x gave no answer to /slow within 0.5 s"):
        server.post("/slow", {}, timeout=0.5)
    os.killpg(server.pid, signal.SIGSTOP)
    with pytest.raises(EngineError, match=r"gave no answer to /health within 0.5 s"):
        server.get("/health", timeout=0.5)
    server.stop()
    assert gone(server.pid)
