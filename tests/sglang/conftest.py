"""SGLang servers on the tiny model, each started once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_sglang import sglang_config

from relax_pipeline.rollout.sglang.engine import SglangEngine
from relax_pipeline.rollout.sglang.make import make_sglang_engine

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def adapter_engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    """A server with room for rank-3 adapters on all linear layers."""
    engine = make_sglang_engine(sglang_config(tiny_model, tmp_path_factory.mktemp("runs")), engine_id="engine-0")
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def merge_engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    """A server for whole models."""
    config = sglang_config(
        tiny_model, tmp_path_factory.mktemp("runs"), sync={"mode": "merge"}, engine={"offload": "all"}
    )
    engine = make_sglang_engine(config, engine_id="engine-0")
    yield engine
    engine.close()
