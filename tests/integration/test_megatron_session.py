"""A run whose trainer is two Megatron ranks, resumed under another layout of them."""

from __future__ import annotations

from typing import Any

import pytest

from relax_pipeline.build import open_session
from relax_pipeline.config import RunConfig

pytestmark = [pytest.mark.slow, pytest.mark.megatron]


def run(values: dict[str, Any], *, first: int, last: int, **layout: int) -> list[dict[str, float]]:
    """The steps. Every sync on the way compares names, digests and logprobs of trainer and engine."""
    trainer = {"kind": "megatron", "device": "cpu", **layout}
    config = RunConfig.model_validate(values | {"steps": last, "evaluation": None, "trainer": trainer})
    rows = []
    with open_session(config) as session:
        assert session.restore().step == first - 1
        session.sync()
        for step in range(first, last + 1):
            session.rollout(step)
            session.score(step)
            session.train(step)
            session.sync()
            rows.append(session.finish_step(step))
            session.save(step)
    return rows


def test_a_run_changes_its_layout_between_attempts(run_values: dict[str, Any]) -> None:
    rows = run(run_values, first=1, last=2, tensor_parallel_size=2)
    rows += run(run_values, first=3, last=3, pipeline_parallel_size=2)
    for row in rows:
        assert row["train/rollout_logprob_abs_diff_max"] < 1e-4
        assert row["sync/probe_difference"] < 1e-4
