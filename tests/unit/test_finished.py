from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_run import run_config

from relax_pipeline.errors import ConfigError
from relax_pipeline.finished import awaits_publishing, run_names


def make_run(output: Path, *, saved: tuple[int, ...], published: int | None = None, enabled: bool = True) -> None:
    """A run of 20 steps, as its files tell it."""
    folder = output / "tiny"
    publish = {"enabled": enabled, "destination": "file:///models"}
    config = run_config(output / "model", publish=publish)
    for step in saved:
        (folder / "checkpoints" / f"step-{step:07d}").mkdir(parents=True)
        (folder / "checkpoints" / f"step-{step:07d}" / "COMMITTED").touch()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config.model_dump_json())
    if published is not None:
        (folder / "PUBLISHED.json").write_text(json.dumps({"step": published}))


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"saved": (10, 20)}, True),
        ({"saved": (10, 20), "published": 10}, True),
        ({"saved": (10, 20), "published": 20}, False),
        ({"saved": (10, 20), "enabled": False}, False),
        ({"saved": (10,)}, False),
        ({"saved": ()}, False),
    ],
    ids=["finished", "published earlier", "published", "not to be published", "at step 10", "no checkpoint yet"],
)
def test_what_awaits_publishing(tmp_path: Path, state: dict[str, object], expected: bool) -> None:
    make_run(tmp_path, **state)
    assert run_names(tmp_path) == ["tiny"]
    assert awaits_publishing(tmp_path, "tiny") is expected


def test_a_configuration_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    make_run(tmp_path, saved=(20,))
    (tmp_path / "tiny" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tiny/config\.json is no configuration this version reads"):
        awaits_publishing(tmp_path, "tiny")
