"""Training through the command line, Prefect and Ray, killed in every way and resumed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_pipeline.checkpoint.store import CheckpointStore
from relax_pipeline.metrics.log import StepLog
from relax_pipeline.session.pause import request_pause

pytestmark = [pytest.mark.prefect, pytest.mark.slow, pytest.mark.timeout(1800)]

Start = Callable[..., subprocess.Popen[str]]


def wait(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return output


def final_adapter(run: Path) -> bytes:
    newest = CheckpointStore(run / "checkpoints").committed()[-1]
    return (newest.path / "adapter" / "adapter_model.safetensors").read_bytes()


def trained_prompts(run: Path) -> Counter[int]:
    return Counter(prompt for row in StepLog(run / "samples.jsonl").rows() for prompt in row["trained_prompts"])


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Return once a step is done."""
    while process.poll() is None:
        rows = StepLog(run / "metrics.jsonl").rows()
        if rows and rows[-1]["step"] >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"training ended before step {step}: {process.communicate()[0]}")


def kill(run: Path, victim: str, process: subprocess.Popen[str]) -> None:
    """SIGKILL the trainer, an engine, or the process of the flow, as soon as it is there to be killed."""
    while process.poll() is None:
        processes = json.loads((run / "processes.json").read_text() or "{}")
        if processes.get("flow") == process.pid:
            pid = {"trainer": processes["trainer"][0], "engine": processes["engines"][0], "flow": process.pid}[victim]
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
                return
        time.sleep(0.05)
    raise AssertionError(f"training ended before the {victim} could be killed: {process.communicate()[0]}")


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_seven_kills_change_nothing(prefect_api: str, run_values: dict[str, Any], command: Start) -> None:
    runs = Path(run_values["output_dir"])
    long_run = run_values | {"steps": 42, "checkpoint": run_values["checkpoint"] | {"background": True}}
    wait(command("train", long_run | {"run_name": "whole"}))

    chance = random.Random(7)
    victims = ["engine", "trainer"] * 2 + ["flow"] * 3
    chance.shuffle(victims)
    steps = sorted(chance.sample(range(2, 40), len(victims)))
    process = command("train", long_run | {"run_name": "killed"})
    for step, victim in zip(steps, victims, strict=True):
        wait_for_step(runs / "killed", step, process)
        time.sleep(chance.random() * 0.5)
        kill(runs / "killed", victim, process)
        if victim == "flow":
            process.communicate()
            process = command("train", long_run | {"run_name": "killed"})
        else:
            time.sleep(1.0)  # the flow notices by itself
    wait(process)

    assert final_adapter(runs / "killed") == final_adapter(runs / "whole")
    assert trained_prompts(runs / "killed") == trained_prompts(runs / "whole")
    assert [row["step"] for row in StepLog(runs / "killed" / "metrics.jsonl").rows()] == list(range(43))


def test_a_killed_flow_leaves_no_process(prefect_api: str, run_values: dict[str, Any], command: Start) -> None:
    run = Path(run_values["output_dir"]) / "tiny"
    process = command("train", run_values | {"steps": 500})
    wait_for_step(run, 2, process)
    processes = json.loads((run / "processes.json").read_text())
    pids = [*processes["trainer"], *processes["engines"]]
    assert all(is_alive(pid) for pid in pids)
    kill(run, "flow", process)
    process.communicate()
    deadline = time.monotonic() + 30
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not [pid for pid in pids if is_alive(pid)]


@pytest.mark.parametrize("mode", ["adapter", "merge"])
def test_rollouts_run_ahead_within_the_bound(
    mode: str, prefect_api: str, run_values: dict[str, Any], command: Start
) -> None:
    values = run_values | {"sync": {"mode": mode}, "steps": 12}
    values["rollout"] = values["rollout"] | {"staleness": 2}
    wait(command("train", values))
    rows = StepLog(Path(values["output_dir"]) / "tiny" / "metrics.jsonl").rows()
    staleness = [row["staleness/max"] for row in rows if "staleness/max" in row]
    assert len(rows) == 13
    assert 1 <= max(staleness) <= 2


def test_a_finished_run_is_merged_and_published_once(
    prefect_api: str, run_values: dict[str, Any], command: Start, tmp_path: Path
) -> None:
    destination = f"file://{tmp_path / 'models'}"
    values = run_values | {"publish": {"enabled": True, "destination": destination}}
    wait(command("train", values))
    run = Path(values["output_dir"]) / "tiny"
    first = json.loads((run / "PUBLISHED.json").read_text())
    assert first["outcome"] == "published"
    assert_same_logits(Path(first["uri"].removeprefix("file://")), Path(values["model"]["path"]), run)

    wait(command("train", values))  # nothing left to train
    again = json.loads((run / "PUBLISHED.json").read_text())
    assert (again["outcome"], again["uri"]) == ("already_published", first["uri"])


def assert_same_logits(model: Path, base: Path, run: Path) -> None:
    """The published model against base and adapter through peft."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    adapter = CheckpointStore(run / "checkpoints").committed()[-1].path / "adapter"
    ids = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(model)(ids).logits
        adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)(ids).logits
    assert (merged - adapted).abs().max() < 1e-4


def test_a_paused_run_started_by_hand_ends_and_says_how_to_go_on(
    prefect_api: str, run_values: dict[str, Any], command: Start
) -> None:
    run = Path(run_values["output_dir"]) / "tiny"
    process = command("train", run_values | {"steps": 100_000, "evaluation": None, "checkpoint": {"every": 1000}})
    wait_for_step(run, 1, process)
    request_pause(run)
    output = wait(process)
    step = CheckpointStore(run / "checkpoints").committed()[-1].step
    assert StepLog(run / "metrics.jsonl").tail(1)[0]["step"] == step
    assert f"tiny is paused after step {step} of 100000; start it again to go on" in output
    assert "report: " not in output


def test_another_rank_or_base_is_refused_at_resume(
    prefect_api: str, run_values: dict[str, Any], command: Start, tmp_path: Path
) -> None:
    from tiny_model import write_tiny_model

    values = run_values | {"steps": 2}
    wait(command("train", values))
    other_base = {"path": str(write_tiny_model(tmp_path / "other", seed=1)), "dtype": "float32"}
    for change, expected in (
        ({"lora": {"rank": 8}}, "rank: checkpoint 4, this run 8; set lora.rank back"),
        ({"model": other_base}, "model.path holds another model than the one trained"),
    ):
        refused = command("train", values | {"steps": 4} | change)
        output, _ = refused.communicate(timeout=300)
        assert refused.returncode == 1
        assert expected in output
        assert "Beginning flow run" not in output
