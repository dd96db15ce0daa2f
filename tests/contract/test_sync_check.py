"""The sync check and the doctor, on real processes with the reference engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_run import run_config

from relax_pipeline.doctor import TRIED_TOGETHER, diagnose
from relax_pipeline.sync_check import check_sync, for_check, probe_sequences, sync_modes

# On a busy machine Ray's shutdown does not wait for the processes of its own that it has ended.
pytestmark = pytest.mark.filterwarnings("ignore:.*function Popen.__del__:pytest.PytestUnraisableExceptionWarning")


@pytest.mark.slow
def test_both_versions_arrive_and_differ(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    config = run_config(tiny_model, output_dir=str(tmp_path), cluster={"num_cpus": 2}, sync={"transport": "ipc"})
    checked = list(check_sync(config, "adapter"))
    assert [item.report.version for item in checked] == [0, 1]
    assert [item.failure for item in checked] == [None, None]
    assert checked[0].moved == 0
    assert checked[1].moved > 100 * (checked[1].report.probe_difference or 0)


@pytest.mark.parametrize(
    ("lora", "modes"),
    [
        ({}, ["adapter", "merge"]),
        ({"target_modules": ["linear_qkv", "router"]}, ["adapter"]),
        ({"rank": 0}, ["merge"]),
    ],
)
def test_modes_follow_from_what_trains(tiny_model: Path, lora: dict[str, object], modes: list[str]) -> None:
    sync = {"mode": "merge" if lora.get("rank") == 0 else "adapter"}
    assert sync_modes(run_config(tiny_model, lora=lora, sync=sync)) == modes


def test_check_is_a_run_of_its_own_that_always_compares(tiny_model: Path) -> None:
    config = run_config(tiny_model, sync={"verify": False, "verify_every": 9}, optimizer={"learning_rate": 1e-5})
    checked = for_check(config, "merge")
    assert (checked.run_name, checked.sync.mode) == ("tiny-sync-check", "merge")
    assert (checked.sync.verify, checked.sync.verify_every) == (True, 1)
    assert checked.optimizer.learning_rate == 1e-2


def test_probe_draws_from_the_model_s_vocabulary(tiny_model: Path) -> None:
    sequences = probe_sequences(run_config(tiny_model))
    assert [len(sequence) for sequence in sequences] == [48, 17]
    assert max(max(sequence) for sequence in sequences) < 81


def test_doctor_looks_at_every_pin_and_backend() -> None:
    findings = {finding.name: finding for finding in diagnose()}
    assert set(TRIED_TOGETHER) < set(findings)
    assert findings["torch"].detail.startswith("2.")
    assert findings["engine.kind hf"].detail == "can start"
    assert findings["engine.kind vllm"].state == "missing"
