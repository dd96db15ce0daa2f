"""The publishing sweep, on a real Prefect server: one broken run does not hold up the others, and is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.sweep import publish_finished
from relax_pipeline.errors import PublishError

pytestmark = pytest.mark.prefect


def test_nothing_to_publish(prefect_api: str, tmp_path: Path) -> None:
    assert publish_finished(output_dir=str(tmp_path)) == []


def test_a_broken_run_is_named(prefect_api: str, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    with pytest.raises(PublishError, match="not published, see the log: broken"):
        publish_finished(output_dir=str(tmp_path))
