"""A PEFT adapter to start training from, checked against what the trainer has built."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from relax_pipeline.errors import AdapterError
from relax_pipeline.lora.adapter import CONFIG_FILE, META_FILE, WEIGHTS_FILE, make_adapter
from relax_pipeline.lora.names import lora_key, parse_lora_key
from relax_pipeline.safetensors_io.identity import model_digest
from relax_pipeline.types import AdapterSpec

_SETTINGS_NOT_KNOWN_HERE = (
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "fan_in_fan_out",
    "modules_to_save",
    "lora_bias",
    "target_parameters",
)
_INITS_THAT_KEEP_THE_BASE = (None, True, False, "gaussian", "eva", "orthogonal")


def read_warm_start(
    folder: Path, *, spec: AdapterSpec, modules: Collection[str], base: Path
) -> dict[str, torch.Tensor]:
    """Read an adapter in float32, by HF-PEFT name.

    Args:
        folder: Holds adapter_config.json and adapter_model.safetensors. The digest of the base that an adapter of ours
            has beside them is compared; others say nothing of their base's content.
        spec: Rank and alpha it must have.
        modules: Full HF names of the modules it must adapt, all of them and no others.
        base: Folder of the model that is to be trained.

    Raises:
        AdapterError: It cannot be read, or is not what the trainer has built; says both sides.
    """
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
        tensors = load_file(folder / WEIGHTS_FILE)
        meta = json.loads((folder / META_FILE).read_text()) if (folder / META_FILE).is_file() else {}
    except (OSError, ValueError, SafetensorError) as error:
        raise AdapterError(f"lora.start_from {folder} is no PEFT adapter that can be read: {error}") from error
    _check_config(config, spec, folder)
    if (digest := meta.get("base_digest")) and digest != model_digest(base):
        raise AdapterError(f"lora.start_from {folder} was trained on another base than model.path {base}")
    named = {lora_key(*parse_lora_key(name)): tensor.float() for name, tensor in tensors.items()}
    found = set(make_adapter(named, spec=spec, version=0).info.modules)
    if found != set(modules):
        raise AdapterError(
            f"lora.start_from {folder} adapts other modules than lora.target_modules and lora.scope: it lacks "
            f"{sorted(set(modules) - found)[:3]} and has {sorted(found - set(modules))[:3]}"
        )
    return named


def _check_config(config: Mapping[str, Any], spec: AdapterSpec, folder: Path) -> None:
    for name, setting, wanted in (("r", "rank", spec.rank), ("lora_alpha", "alpha", spec.alpha)):
        if config.get(name) != wanted:
            raise AdapterError(
                f"lora.start_from {folder}: {name} is {config.get(name)!r}, lora.{setting} is {wanted}; they must agree"
            )
    strange = {name: config[name] for name in _SETTINGS_NOT_KNOWN_HERE if config.get(name)}
    if config.get("peft_type") != "LORA":
        strange["peft_type"] = config.get("peft_type")
    if config.get("bias", "none") != "none":
        strange["bias"] = config["bias"]
    if config.get("init_lora_weights") not in _INITS_THAT_KEEP_THE_BASE:
        strange["init_lora_weights"] = config["init_lora_weights"]
    if strange:
        raise AdapterError(f"lora.start_from {folder} is no plain LoRA adapter: {strange} cannot be trained on here")
