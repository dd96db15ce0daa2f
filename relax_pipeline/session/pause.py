"""A person's request to pause a run, and what they changed meanwhile: two small files in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_pipeline.checkpoint.mirror import CHANGES_FILE
from relax_pipeline.config import RunConfig, check_config
from relax_pipeline.errors import ConfigError
from relax_pipeline.storage.files import write_atomic

_REQUEST_FILE = "PAUSE"

Changes = dict[str, dict[str, Any]]
"""Dotted setting to the value the run was started with (`given`) and the one that holds instead (`chosen`)."""


def request_pause(run_folder: Path) -> None:
    """Ask the run to pause after the step it is at.

    Raises:
        ConfigError: No run's folder.
    """
    if not (run_folder / "config.json").is_file():
        raise ConfigError(f"{run_folder} is no run folder: it has no config.json")
    (run_folder / _REQUEST_FILE).touch()


def take_request(run_folder: Path) -> bool:
    """Return whether a pause was asked for, and forget it."""
    try:
        (run_folder / _REQUEST_FILE).unlink()
    except FileNotFoundError:
        return False
    return True


def read_changes(run_folder: Path) -> Changes:
    """Return what was changed at pauses of the run and still holds."""
    file = run_folder / CHANGES_FILE
    changes: Changes = json.loads(file.read_text()) if file.exists() else {}
    return changes


def apply_changes(config: RunConfig, run_folder: Path) -> RunConfig:
    """Return a run's configuration with what was changed at its pauses.

    A change replaces the value that the run was started with, however it is started again. Once the configuration
    itself has another value, that one is newer: it holds, and the change is forgotten.

    Raises:
        ConfigError: A change does not go with the rest of the configuration any more.
    """
    changes = read_changes(run_folder)
    values = config.model_dump(mode="json")
    holding = {key: change for key, change in changes.items() if _get(values, key) == change["given"]}
    if holding != changes:
        _write(run_folder, holding)
    return _changed(config, {key: change["chosen"] for key, change in holding.items()}, run_folder)


def change_config(config: RunConfig, run_folder: Path, wanted: Mapping[str, Any], *, step: int) -> RunConfig:
    """Record changes made at a pause, and return the configuration that holds from here on.

    Args:
        config: That held until now: `apply_changes` has been at it.
        run_folder: Of the run.
        wanted: Dotted setting to value.
        step: Steps done.

    Raises:
        ConfigError: The configuration refuses a value, or there are fewer steps than were done; nothing is recorded.
    """
    changed = _changed(config, wanted, run_folder)
    if changed.steps < step:
        raise ConfigError(f"steps: {changed.steps}, and {step} are done: set it to {step} or more")
    values, changes = config.model_dump(mode="json"), read_changes(run_folder)
    for key, value in wanted.items():
        before = _get(values, key)
        if value != before:
            changes[key] = {"given": changes.get(key, {}).get("given", before), "chosen": value}
    _write(run_folder, changes)
    return changed


def _changed(config: RunConfig, wanted: Mapping[str, Any], run_folder: Path) -> RunConfig:
    values = config.model_dump(mode="json")
    for key, value in wanted.items():
        *sections, leaf = key.split(".")
        target = values
        for section in sections:
            target = target[section]
        target[leaf] = value
    return check_config(values, source=f"changes of {run_folder.name}") if wanted else config


def _get(values: dict[str, Any], key: str) -> Any:
    found: Any = values
    for part in key.split("."):
        found = found[part]
    return found


def _write(run_folder: Path, changes: Changes) -> None:
    write_atomic(run_folder / CHANGES_FILE, json.dumps(changes, indent=2) + "\n")
