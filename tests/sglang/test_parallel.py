"""One engine over two processes of its server, in both modes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_sglang import assert_drawn_from, folded, full_adapter, requests, sglang_config, whole_model

from relax_pipeline.rollout.sglang.engine import SglangEngine
from relax_pipeline.rollout.sglang.make import make_sglang_engine

pytestmark = [pytest.mark.slow, pytest.mark.sglang]


@pytest.fixture(params=["adapter", "merge"])
def engine(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> Iterator[SglangEngine]:
    config = sglang_config(tiny_model, tmp_path, engine={"tensor_parallel_size": 2}, sync={"mode": request.param})
    engine = make_sglang_engine(config, engine_id="engine-0")
    yield engine
    engine.close()


def test_every_rank_gets_the_weights(engine: SglangEngine, tiny_model: Path) -> None:
    if engine.info().leaf_modules:
        engine.stage(full_adapter(1))
    else:
        engine.load_weights(whole_model(tiny_model, full_adapter(1)), version=1)
    engine.activate(1)
    batch = requests(4)
    assert_drawn_from(folded(tiny_model, full_adapter(1)), batch, engine.generate(batch, version=1))
