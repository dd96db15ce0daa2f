from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_pipeline.config import RunConfig
from relax_pipeline.errors import ConfigError
from relax_pipeline.session.pause import apply_changes, change_config, read_changes, request_pause, take_request


def config(*, steps: int = 20, **optimizer: Any) -> RunConfig:
    values = {"run_name": "r", "steps": steps, "model": {"path": "m"}, "data": {"train": {"path": "p"}}}
    return RunConfig.model_validate(values | {"sync": {"mode": "adapter"}, "optimizer": optimizer})


def test_a_request_is_taken_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    request_pause(tmp_path)
    assert [take_request(tmp_path), take_request(tmp_path)] == [True, False]


def test_only_a_run_can_be_paused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run folder"):
        request_pause(tmp_path)


def test_changes_hold_for_a_run_started_again_as_before(tmp_path: Path) -> None:
    change_config(config(learning_rate=1e-3), tmp_path, {"optimizer.learning_rate": 5e-4, "steps": 9}, step=7)
    changed = apply_changes(config(learning_rate=1e-3), tmp_path)
    assert changed == config(steps=9, learning_rate=5e-4)


def test_a_second_change_replaces_the_value_the_run_was_started_with(tmp_path: Path) -> None:
    once = change_config(config(), tmp_path, {"steps": 30}, step=7)
    change_config(once, tmp_path, {"steps": 40, "optimizer.learning_rate": 2e-5}, step=25)
    assert read_changes(tmp_path) == {"steps": {"given": 20, "chosen": 40}}
    assert apply_changes(config(), tmp_path).steps == 40


def test_a_newer_value_of_the_configuration_ends_its_change(tmp_path: Path) -> None:
    change_config(config(), tmp_path, {"steps": 30, "optimizer.learning_rate": 5e-4}, step=7)
    assert apply_changes(config(steps=50), tmp_path) == config(steps=50, learning_rate=5e-4)
    assert apply_changes(config(), tmp_path) == config(learning_rate=5e-4)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"optimizer.learning_rate": -1.0}, "optimizer.learning_rate: input should be greater than 0, got -1.0"),
        ({"steps": 6}, "steps: 6, and 7 are done: set it to 7 or more"),
    ],
)
def test_a_refused_change_leaves_nothing(tmp_path: Path, wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        change_config(config(), tmp_path, wanted, step=7)
    assert read_changes(tmp_path) == {}
