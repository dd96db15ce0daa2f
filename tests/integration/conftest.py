"""Real services for the integration tests: a Prefect server, and small runs to give to it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a Prefect server of the test session's own; it is in the environment for sub-processes."""
    home = tmp_path_factory.mktemp("prefect")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PREFECT_API_URL", raising=False)
        patch.setenv("PREFECT_HOME", str(home))
        patch.setenv("PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL", "WARNING")
        from prefect.settings import PREFECT_API_URL, PREFECT_HOME, PREFECT_SERVER_API_PORT, temporary_settings

        from flows.local_server import prefect_server

        # Prefect may have read the environment already. Any port: another pytest process may start a server meanwhile.
        ours = {PREFECT_HOME: home, PREFECT_SERVER_API_PORT: 0}
        with temporary_settings(ours, restore_defaults={PREFECT_API_URL}), prefect_server() as url:
            patch.setenv("PREFECT_API_URL", url)
            yield url


@pytest.fixture
def run_values(tiny_model: Path, tmp_path: Path) -> dict[str, Any]:
    """Settings of a run that learns to write digits: seconds on a CPU."""
    numbers = random.Random(0).sample(range(1000), 48)
    lines = [json.dumps({"prompt": f"{number}+1=", "label": str(number + 1)}) + "\n" for number in numbers]
    (tmp_path / "train.jsonl").write_text("".join(lines))
    (tmp_path / "heldout.jsonl").write_text("".join(lines[:6]))
    return {
        "run_name": "tiny",
        "output_dir": str(tmp_path / "runs"),
        "steps": 8,
        "model": {"path": str(tiny_model), "dtype": "float32"},
        "lora": {"rank": 4, "alpha": 8},
        "data": {"train": {"path": str(tmp_path / "train.jsonl")}},
        "evaluation": {"source": {"path": str(tmp_path / "heldout.jsonl")}, "every": 4},
        "rollout": {
            "prompts_per_step": 4,
            "completions_per_prompt": 4,
            "max_new_tokens": 6,
            "max_resample_rounds": 1,
        },
        "rewards": {"scorers": [{"kind": "regex", "options": {"pattern": "[0-9]"}}], "workers": 1},
        "optimizer": {"learning_rate": 1e-2},
        "sync": {"mode": "adapter"},
        "checkpoint": {"every": 2},
    }


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start `relax-pipeline` in a process of its own with a configuration file made of the given settings."""

    def start(verb: str, values: dict[str, Any], *arguments: str) -> subprocess.Popen[str]:
        config = tmp_path / "run.yaml"
        config.write_text(json.dumps(values))
        return subprocess.Popen(
            [sys.executable, "-m", "flows.cli", verb, str(config), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start
