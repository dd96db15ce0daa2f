"""Models and settings of the tests with Megatron."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from megatron_models import write_model

Folder = Callable[[str], Path]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Where a family's model lies, made when first asked for."""
    root = tmp_path_factory.mktemp("families")

    def of(family: str) -> Path:
        path = root / family
        return path if path.exists() else write_model(path, family)

    return of


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process only, dissolved afterwards."""
    from relax_pipeline.trainer.megatron.parallel import leave

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    leave()
