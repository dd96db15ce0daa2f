"""Resolve target names and scope to the full module names that get adapters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from relax_pipeline.config import LoraConfig
from relax_pipeline.config.model import MEGATRON_TO_HF_MODULES
from relax_pipeline.errors import ConfigError

VISION_REGIONS = frozenset(
    {"vision_model", "visual", "vit", "image_encoder", "projector", "audio", "vision_tower", "audio_tower", "merger"}
)
"""Path segments of the parts of a multimodal model that do not read text."""


def in_vision_region(module: str) -> bool:
    """Whether a full module name lies in a vision or audio part: whole segments, not substrings."""
    return not VISION_REGIONS.isdisjoint(module.split("."))


def resolve_targets(linear_modules: Iterable[str], lora: LoraConfig) -> tuple[str, ...]:
    """Return the full names of the linear modules that get an adapter, in model order.

    Args:
        linear_modules: Full names of all linear modules.
        lora: Targets in Megatron names, and the scope.

    Raises:
        ConfigError: A target matches no module in the scope; names what the model has instead.
    """
    scoped = [name for name in linear_modules if _in_scope(name, lora.scope)]
    leaves = {name.rpartition(".")[2] for name in scoped}
    for target in lora.target_modules:
        if leaves.isdisjoint(MEGATRON_TO_HF_MODULES[target]):
            raise ConfigError(
                f"lora.target_modules: {target!r} ({', '.join(MEGATRON_TO_HF_MODULES[target])}) matches no linear "
                f"module in scope {lora.scope!r}; the model has {', '.join(sorted(leaves)) or 'none there'}"
            )
    wanted = set(lora.hf_target_modules)
    return tuple(name for name in scoped if name.rpartition(".")[2] in wanted)


def _in_scope(module: str, scope: Literal["all", "language", "vision"]) -> bool:
    return scope == "all" or in_vision_region(module) == (scope == "vision")
