"""From configuration to an engine, importing only the backend that was asked for."""

from __future__ import annotations

from relax_pipeline.config import RunConfig
from relax_pipeline.errors import ConfigError
from relax_pipeline.rollout.base import Engine


def make_engine(config: RunConfig, *, engine_id: str) -> Engine:
    """Build the configured engine in this process.

    Raises:
        ConfigError: The backend is not available.
    """
    match config.engine.kind:
        case "hf":
            from relax_pipeline.rollout.hf import HfEngine  # noqa: PLC0415

            return HfEngine(engine_id=engine_id, model=config.model, config=config.engine)
        case "sglang":
            from relax_pipeline.rollout.sglang.make import make_sglang_engine  # noqa: PLC0415

            return make_sglang_engine(config, engine_id=engine_id)
        case kind:
            raise ConfigError(f"engine.kind {kind!r} is not available yet; use hf or sglang")
