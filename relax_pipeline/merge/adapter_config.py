"""What an adapter_config.json says, with everything this software cannot merge refused by name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from relax_pipeline.errors import AdapterError
from relax_pipeline.merge.base import read_json

MERGED = {
    "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "peft_version",
    "target_parameters", "ensure_weight_tying",
}  # fmt: skip
HARMLESS = {
    "peft_type", "task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save", "bias",
    "lora_dropout", "init_lora_weights", "runtime_config", "eva_config", "loftq_config", "corda_config",
    "lora_ga_config", "megatron_core", "qalora_group_size",
}  # fmt: skip
"""They steer training or loading, or the tensors themselves show what they did."""
INITS_THAT_KEEP_THE_BASE = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class AdapterConfig:
    """The part of adapter_config.json that decides the merged weights."""

    rank: int
    alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    ensure_weight_tying: bool = False
    peft_version: str = ""
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    def rank_of(self, module: str) -> int:
        """Return the rank of one module."""
        return int(_pattern_value(self.rank_pattern, module, self.rank))

    def scaling_of(self, module: str) -> float:
        """Return what B @ A is multiplied with: alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv:2312.03732)."""
        rank, alpha = self.rank_of(module), _pattern_value(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def read_adapter_config(file: Path) -> AdapterConfig:
    """Read adapter_config.json.

    Raises:
        AdapterError: No LoRA, a missing value, or a setting whose effect on the weights is not known here.
    """
    raw = read_json(file, AdapterError)
    if raw.get("peft_type") != "LORA":
        raise AdapterError(f"{file}: peft_type is {raw.get('peft_type')!r}, only LORA adapters can be merged")
    for name in ("r", "lora_alpha"):
        if not isinstance(raw.get(name), int | float) or raw[name] <= 0:
            raise AdapterError(f"{file}: {name} is {raw.get(name)!r}, expected a positive number")
    for name, value in raw.items():
        if name not in MERGED | HARMLESS and value:
            raise AdapterError(f"{file}: {name}={value!r} changes how the adapter acts and cannot be merged")
    init = raw.get("init_lora_weights")
    if not any(init is known or init == known for known in INITS_THAT_KEEP_THE_BASE):
        raise AdapterError(
            f"{file}: init_lora_weights={init!r} also changed the base weights in training; save the adapter again "
            "with path_initial_model_for_weight_conversion, which makes it fit the original base"
        )
    return AdapterConfig(
        rank=raw["r"],
        alpha=raw["lora_alpha"],
        use_rslora=bool(raw.get("use_rslora")),
        use_dora=bool(raw.get("use_dora")),
        ensure_weight_tying=bool(raw.get("ensure_weight_tying")),
        peft_version=raw.get("peft_version") or "",
        rank_pattern=raw.get("rank_pattern") or {},
        alpha_pattern=raw.get("alpha_pattern") or {},
    )


def _pattern_value(patterns: Mapping[str, float], module: str, default: float) -> float:
    """Return the value of the first pattern that matches the end of a module's name, as peft does."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
