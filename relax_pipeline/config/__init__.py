"""The configuration: frozen pydantic models, importable without torch."""

from __future__ import annotations

from relax_pipeline.config.algorithm import AlgorithmConfig, OptimizerConfig
from relax_pipeline.config.cluster import ClusterConfig
from relax_pipeline.config.data import (
    DataConfig,
    EvalConfig,
    OverlongConfig,
    PromptSource,
    RewardsConfig,
    RolloutConfig,
    ScorerConfig,
)
from relax_pipeline.config.engine import EngineConfig, HfEngineConfig, SglangEngineConfig, VllmEngineConfig
from relax_pipeline.config.loading import check_config, load_config
from relax_pipeline.config.model import LoraConfig, ModelConfig, expand_target_modules
from relax_pipeline.config.run import RunConfig
from relax_pipeline.config.storage import CheckpointConfig, PublishConfig, TrackingConfig
from relax_pipeline.config.sync import SyncConfig
from relax_pipeline.config.trainer import FsdpTrainerConfig, MegatronTrainerConfig, TrainerConfig

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "DataConfig",
    "EngineConfig",
    "EvalConfig",
    "FsdpTrainerConfig",
    "HfEngineConfig",
    "LoraConfig",
    "MegatronTrainerConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OverlongConfig",
    "PromptSource",
    "PublishConfig",
    "RewardsConfig",
    "RolloutConfig",
    "RunConfig",
    "ScorerConfig",
    "SglangEngineConfig",
    "SyncConfig",
    "TrackingConfig",
    "TrainerConfig",
    "VllmEngineConfig",
    "check_config",
    "expand_target_modules",
    "load_config",
]
