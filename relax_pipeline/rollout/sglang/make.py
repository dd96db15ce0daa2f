"""From a run's configuration to an SGLang engine."""

from __future__ import annotations

from pathlib import Path

from relax_pipeline.config import RunConfig, SglangEngineConfig
from relax_pipeline.lora.packed import leaves
from relax_pipeline.rollout.sglang.engine import SglangEngine
from relax_pipeline.rollout.sglang.launch import LoraRoom
from relax_pipeline.rollout.sglang.model_folder import read_model_folder


def make_sglang_engine(config: RunConfig, *, engine_id: str) -> SglangEngine:
    """Start a server for the run. Whether it has room for adapters follows from sync.mode alone.

    Raises:
        EngineError: It did not come up.
        ModelError: The model folder is no checkpoint.
    """
    assert isinstance(config.engine, SglangEngineConfig)
    return SglangEngine(
        engine_id=engine_id,
        model=config.model,
        config=config.engine,
        lora=lora_room(config) if config.sync.mode == "adapter" else None,
        log_folder=Path(config.output_dir).expanduser().resolve() / config.run_name / "logs",
        control_timeout=config.sync.timeout_seconds,
        generate_timeout=config.rollout.timeout_seconds,
    )


def lora_room(config: RunConfig) -> LoraRoom:
    """Return room for adapters on those of the run's targets that the model has."""
    linears = read_model_folder(Path(config.model.path)).linear_shapes()
    present = {leaf for module in linears for leaf in leaves(module)}
    targets = tuple(sorted(present.intersection(config.lora.hf_target_modules)))
    return LoraRoom(config.lora.rank, targets, versions=config.rollout.versions_in_use)
