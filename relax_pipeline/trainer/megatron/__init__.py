"""The Megatron-Core + Megatron-Bridge trainer. Importing it takes 10 s or more."""

from __future__ import annotations

from relax_pipeline.trainer.megatron.compat import importable

with importable():
    from relax_pipeline.trainer.megatron.trainer import MegatronTrainer

__all__ = ["MegatronTrainer"]
