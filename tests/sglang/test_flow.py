"""A whole run on a CPU: fsdp trainer, SGLang engines, in processes of their own on a real Ray."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from tiny_sglang import sglang_config

from relax_pipeline.build import open_session
from relax_pipeline.config import RunConfig
from relax_pipeline.inputs import run_folder
from relax_pipeline.session.session import TrainingSession

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sglang,
    # On a busy machine Ray's shutdown does not wait for the processes of its own that it has ended.
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in. <function Popen.__del__:pytest.PytestUnraisableExceptionWarning"
    ),
]


@pytest.fixture(autouse=True)
def quiet_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")


def digits_run(model: Path, folder: Path, **sections: Any) -> RunConfig:
    """A run that learns to write digits."""
    lines = [json.dumps({"prompt": f"{number}+1=", "label": "1"}) + "\n" for number in range(48)]
    random.Random(0).shuffle(lines)
    (folder / "train.jsonl").write_text("".join(lines))
    rollout = {"prompts_per_step": 4, "completions_per_prompt": 4, "max_new_tokens": 8} | sections.pop("rollout", {})
    return sglang_config(
        model,
        folder / "runs",
        data={"train": {"path": str(folder / "train.jsonl")}},
        rewards={"scorers": [{"kind": "regex", "options": {"pattern": "[0-9]"}}], "workers": 1},
        rollout=rollout,
        cluster={"num_cpus": 2},
        **sections,
    )


def engine_pids(config: RunConfig) -> list[int]:
    """Who serves, as of the last sync."""
    pids: list[int] = json.loads((run_folder(config) / "processes.json").read_text())["engines"]
    return pids


def take_step(session: TrainingSession, step: int) -> dict[str, float]:
    session.rollout(step)
    session.score(step)
    session.train(step)
    session.sync()
    return session.finish_step(step)


def test_adapter_run_survives_the_death_of_its_server(tiny_model: Path, tmp_path: Path) -> None:
    config = digits_run(tiny_model, tmp_path, sync={"transport": "ipc"}, rollout={"staleness": 1})
    with open_session(config) as session:
        session.restore()
        session.sync()
        rows = [take_step(session, step) for step in (1, 2)]
        lost = engine_pids(config)
        os.killpg(lost[0], signal.SIGKILL)
        rows += [take_step(session, step) for step in (3, 4)]
        assert engine_pids(config) != lost
    assert [row["policy_version"] for row in rows] == [1, 2, 3, 4]
    assert max(row["staleness/max"] for row in rows) <= 1
    assert all(0 <= row["sync/probe_difference"] < 1e-4 for row in rows)
    on_policy = [row for row in rows if row["staleness/max"] == 0]
    assert all(row["train/rollout_logprob_abs_diff_max"] < 1e-4 for row in on_policy)


def test_merged_run(tiny_model: Path, tmp_path: Path) -> None:
    config = digits_run(tiny_model, tmp_path, sync={"mode": "merge"}, engine={"offload": "kv_cache"})
    with open_session(config) as session:
        session.restore()
        session.sync()
        started = engine_pids(config)
        rows = [take_step(session, step) for step in (1, 2)]
        assert engine_pids(config) == started
    assert [row["policy_version"] for row in rows] == [1, 2]
    assert all(row["sync/bytes"] == 26848 * 4 for row in rows)
    assert all(0 <= row["sync/probe_difference"] < 1e-4 for row in rows)
    assert all(row["train/rollout_logprob_abs_diff_max"] < 1e-4 for row in rows)
