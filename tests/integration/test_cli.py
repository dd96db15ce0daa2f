"""What a newcomer meets on the command line: help, plans, and errors that say what to change."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run `relax-pipeline` in this process; return its exit status and what it printed."""
    from flows.cli import main

    def run(*arguments: str, values: dict[str, Any] | None = None) -> tuple[int, str]:
        if values is not None:
            (tmp_path / "run.yaml").write_text(json.dumps(values))
            arguments = (*arguments[:1], str(tmp_path / "run.yaml"), *arguments[1:])
        monkeypatch.setattr(sys, "argv", ["relax-pipeline", *arguments])
        monkeypatch.setenv("COLUMNS", "200")
        status = 0
        try:
            main()
        except SystemExit as end:
            status = int(end.code or 0)
        captured = capsys.readouterr()
        return status, " ".join((captured.out + captured.err).split())

    return run


def changed(values: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a copy with one dotted setting changed."""
    copy: dict[str, Any] = json.loads(json.dumps(values))
    *sections, leaf = key.split(".")
    target = copy
    for section in sections:
        target = target.setdefault(section, {})
    target[leaf] = value
    return copy


def test_help_names_every_command(cli: Run) -> None:
    status, text = cli("--help")
    assert status == 0
    for command in ("train", "submit", "plan", "report", "checkpoints", "merge", "publish", "published"):
        assert command in text


def test_plan_shows_sizes_and_settings(cli: Run, run_values: dict[str, Any]) -> None:
    status, text = cli("plan", values=run_values)
    assert status == 0
    assert "plan of tiny" in text
    assert '"learning_rate": 0.01' in text


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("model.path", "/nowhere", "model.path: /nowhere is no Hugging Face checkpoint"),
        ("rollout.temprature", 1.0, "rollout.temprature: unknown key; did you mean temperature?"),
        ("steps", "many", "steps: input should be a valid integer"),
        ("rewards.scorers", [{"kind": "mathe"}], "did you mean math?"),
        ("data.train.path", "/nowhere.jsonl", "/nowhere.jsonl"),
        ("lora.target_modules", ["linear_out"], "known Megatron names"),
        ("engine", {"kind": "vllm"}, "engine.kind 'vllm' is not available yet; use hf or sglang"),
        ("data.max_prompt_tokens", 5000, "lower data.max_prompt_tokens to 4090"),
        ("lora.target_modules", ["in_proj"], "'in_proj' (in_proj_qkv, in_proj_z, in_proj_b, in_proj_a) matches no"),
    ],
)
def test_wrong_settings_are_explained(
    cli: Run, run_values: dict[str, Any], key: str, value: object, expected: str
) -> None:
    status, text = cli("train", values=changed(run_values, key, value))
    assert status == 1
    assert expected in text
    assert "Traceback" not in text


def test_an_empty_dataset_is_explained(cli: Run, run_values: dict[str, Any]) -> None:
    path = Path(run_values["data"]["train"]["path"])
    path.write_text("")
    status, text = cli("train", values=run_values)
    assert status == 1
    assert str(path) in text


def test_a_malformed_row_is_named(cli: Run, run_values: dict[str, Any]) -> None:
    path = Path(run_values["data"]["train"]["path"])
    path.write_text(path.read_text() + '{"prompt": "1+1="}\n')
    status, text = cli("train", values=run_values)
    assert status == 1
    assert "49" in text
    assert "label" in text


def test_a_folder_that_cannot_be_written_is_explained(cli: Run, run_values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, text = cli("train", values=run_values | {"output_dir": str(tmp_path / "file" / "runs")})
    assert status == 1
    assert "output_dir" in text


def test_missing_files_are_explained(cli: Run, tmp_path: Path) -> None:
    assert "no config file" in cli("train", str(tmp_path / "absent.yaml"))[1]
    assert "has no committed checkpoint" in cli("checkpoints", "ls", str(tmp_path))[1]
    assert "is no run folder" in cli("report", str(tmp_path))[1]


def test_fresh_asks_before_it_deletes(cli: Run, run_values: dict[str, Any]) -> None:
    folder = Path(run_values["output_dir"]) / "tiny"
    folder.mkdir(parents=True)
    status, text = cli("train", "--fresh", values=run_values)
    assert status == 1
    assert "add --yes to confirm" in text
    assert folder.exists()
