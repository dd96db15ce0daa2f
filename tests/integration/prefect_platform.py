"""A Prefect server, workers and deployments as users run them: processes that can be killed and started again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey, FlowRunFilter, FlowRunFilterName
from prefect.client.schemas.responses import SetStateStatus
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

REPOSITORY = Path(__file__).parents[2]


class Platform:
    """Everything between a deployment and the process of a flow."""

    def __init__(self, home: Path) -> None:
        self.home = home
        home.mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/api"
        self._environment = os.environ | {
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": self.url,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "20",
            "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
            "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "5",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "RELAX_HOME": str(REPOSITORY),
            "PYTHONPATH": str(REPOSITORY / "tests"),  # for scorers
            "DO_NOT_TRACK": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start everything and deploy."""
        self.start_server()
        self.command(sys.executable, "deployments/prepare_server.py", "--silence", "60")
        self.command("prefect", "--no-prompt", "deploy", "--all", "--prefect-file", "deployments/prefect.yaml")
        for pool in ("relax-train", "relax-cpu"):
            self.start_worker(pool)

    def stop(self) -> None:
        for name in list(self._processes):
            self.kill(name)

    def start_server(self) -> None:
        self._spawn("server", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self.port))
        wait_for(self._is_up, "the server to start", seconds=300)

    def start_worker(self, pool: str) -> None:
        self._spawn(pool, "prefect", "worker", "start", "--pool", pool, "--name", pool)

    def kill(self, name: str) -> None:
        """SIGKILL the server or the worker of a pool: that process, not what it started."""
        process = self._processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def command(self, program: str, *arguments: str) -> None:
        path = str(Path(sys.executable).parent / program) if program == "prefect" else program
        done = subprocess.run(
            [path, *arguments], cwd=REPOSITORY, env=self._environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def client(self) -> SyncPrefectClient:
        with temporary_settings({PREFECT_API_URL: self.url, PREFECT_HOME: self.home}):
            return get_client(sync_client=True)

    def run(self, deployment: str, **parameters: Any) -> UUID:
        """Start a flow run of a deployment, as the UI's quick run does."""
        with self.client() as client:
            found = client.read_deployment_by_name(deployment)
            return client.create_flow_run_from_deployment(found.id, parameters=parameters).id

    def train(self, config: dict[str, Any]) -> UUID:
        return self.run("relax-train/train", config=config)

    def schedule(self, deployment: str, *, after: float, **parameters: Any) -> None:
        """Give a deployment a schedule of its own, due in some seconds and then every day.

        The server looks for new schedules every 5 s, and passes over what was due before.
        """
        due = datetime.now(UTC) + timedelta(seconds=after)
        daily = IntervalSchedule(interval=timedelta(days=1), anchor_date=due)
        with self.client() as client:
            found = client.read_deployment_by_name(deployment)
            schedule = DeploymentScheduleCreate(schedule=daily, parameters=parameters)
            client.create_deployment_schedules(found.id, [schedule])

    def named(self, name: str) -> UUID:
        """Return the flow run of a name."""
        with self.client() as client:
            (found,) = client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[name])))
        return found.id

    def artifact(self, key: str) -> Any:
        """Return what an artifact shows; None where there is none."""
        with self.client() as client:
            found = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])))
        return max(found, key=lambda artifact: artifact.updated).data if found else None

    def state(self, flow_run_id: UUID) -> str:
        with self.client() as client:
            state = client.read_flow_run(flow_run_id).state
        return state.name if state else "none"

    def resume(self, flow_run_id: UUID, form: dict[str, Any]) -> None:
        """Send the form of a suspended run."""
        with self.client() as client:
            answer = client.resume_flow_run(flow_run_id, run_input=form)
        assert answer.status == SetStateStatus.ACCEPT, answer

    def form_text(self, flow_run_id: UUID) -> str:
        """Return what a suspended run says over its form; empty while it is not suspended."""
        with self.client() as client:
            state = client.read_flow_run(flow_run_id).state
            if state is None or not state.is_paused() or not (keys := state.state_details.run_input_keyset):
                return ""
            found = client.filter_flow_run_input(flow_run_id, keys["description"], limit=1, exclude_keys=set())
        return str(found[0].value) if found else ""

    def wait_until(self, flow_run_id: UUID, state: str, *, seconds: float) -> None:
        wait_for(lambda: self.state(flow_run_id) == state, f"the run to be {state}", seconds=seconds, log=self.log)

    def log(self) -> str:
        """Return the end of all logs, for messages."""
        return "\n".join(f"{file.name}:\n{file.read_text()[-3000:]}" for file in sorted(self.home.glob("*.log")))

    def _is_up(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=2).is_success
        except httpx.HTTPError:
            return False

    def _spawn(self, name: str, program: str, *arguments: str) -> None:
        with (self.home / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [str(Path(sys.executable).parent / program), *arguments],
                cwd=self.home,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def processes_of(flow_run_id: UUID) -> list[int]:
    """Return the processes that a flow run has started and that live: all inherit its environment."""
    marker = f"PREFECT__FLOW_RUN_ID={flow_run_id}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has just ended
            continue
    return found


def read_processes(run_folder: Path) -> dict[str, Any]:
    """Return the processes of the attempt that trains, as the run notes them."""
    content: dict[str, Any] = json.loads((run_folder / "processes.json").read_text() or "{}")
    return content


def wait_for(condition: Callable[[], bool], what: str, *, seconds: float, log: Callable[[], str] = lambda: "") -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}\n{log()}"
        time.sleep(0.1)
