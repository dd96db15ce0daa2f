"""The three sides of an adapter's way are compared before anything is sent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_pipeline.errors import SyncError
from relax_pipeline.rollout.base import EngineInfo
from relax_pipeline.sync.contract import Row, check_contract, table

MODULES = ("model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj")
ENGINE = EngineInfo("engine-0", "i", 1, "d", leaf_modules=("down_proj", "q_proj", "up_proj"))


def test_three_sides_that_agree_give_a_table() -> None:
    rows = check_contract(MODULES, MODULES, [ENGINE, replace(ENGINE, engine_id="engine-1")])
    assert rows == [Row("q_proj", 2, 2, True), Row("up_proj", 1, 1, True)]
    assert table(rows).splitlines() == [
        "module                trained  exported  hosted",
        "q_proj                      2         2  yes",
        "up_proj                     1         1  yes",
    ]


@pytest.mark.parametrize(
    ("exported", "engine", "gap"),
    [
        (MODULES[:2], {}, "- model.layers.1.self_attn.q_proj is trained and not exported"),
        (
            (*MODULES, "lm_head"),
            {"leaf_modules": ("lm_head", "q_proj", "up_proj")},
            "- lm_head is exported and not",
        ),
        (MODULES, {"leaf_modules": ("q_proj",)}, "- engine-0 has no room for adapters on up_proj; it has for q_proj"),
        (MODULES, {"data_parallel_size": 2}, "- engine-0 has 2 data-parallel replicas, and an adapter reaches one"),
    ],
)
def test_every_gap_is_listed(exported: tuple[str, ...], engine: dict[str, object], gap: str) -> None:
    with pytest.raises(SyncError, match="adapters would not reach the engines whole:\nmodule ") as raised:
        check_contract(MODULES, exported, [replace(ENGINE, **engine)])  # type: ignore[arg-type]
    assert gap in str(raised.value)
    assert str(raised.value).count("\n- ") == 1


def test_experts_need_an_engine_that_hosts_them() -> None:
    modules = ("model.layers.0.mlp.experts.3.up_proj",)
    check_contract(modules, modules, [ENGINE])
    with pytest.raises(SyncError, match="engine-0 hosts no adapters on experts"):
        check_contract(modules, modules, [replace(ENGINE, expert_adapters=False)])
