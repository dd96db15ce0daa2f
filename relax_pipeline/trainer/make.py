"""From configuration to a trainer, importing only the backend that was asked for."""

from __future__ import annotations

from relax_pipeline.config import MegatronTrainerConfig, RunConfig
from relax_pipeline.trainer.base import RankLayout, Trainer


def make_trainer(config: RunConfig, layout: RankLayout) -> Trainer:
    """Build this process's rank of the configured trainer; all ranks must do so together."""
    if isinstance(config.trainer, MegatronTrainerConfig):
        from relax_pipeline.trainer.megatron import MegatronTrainer  # noqa: PLC0415 - its import takes 10 s

        return MegatronTrainer(config, layout)
    from relax_pipeline.trainer.fsdp import FsdpTrainer  # noqa: PLC0415

    return FsdpTrainer(config, layout)
