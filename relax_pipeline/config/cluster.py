"""Where trainer, engines and reward workers run."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from relax_pipeline.config.base import Section


class ClusterConfig(Section):
    """Where the Ray actors live."""

    ray_address: str = "local"
    """local: a Ray of this run's own, gone with it. auto or ray://host:port: a cluster that runs already."""
    num_cpus: Annotated[int, Field(ge=1)] | None = None
    """CPUs of the local Ray; None: all."""
    colocate: bool = False
    """Trainer and engines share their GPUs."""
    num_gpus: Annotated[int, Field(ge=0)] | None = None
    """GPUs of the local Ray; None: all."""
