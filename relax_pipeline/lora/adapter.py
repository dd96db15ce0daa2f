"""An adapter as a value: its digest, its checks, and its PEFT folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from relax_pipeline.errors import AdapterError
from relax_pipeline.lora.fingerprint import combine_digests, fingerprints
from relax_pipeline.lora.names import adapted_modules, lora_key
from relax_pipeline.lora.packed import unpacked
from relax_pipeline.lora.scope import VISION_REGIONS, in_vision_region
from relax_pipeline.types import Adapter, AdapterSpec, WeightsInfo

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
META_FILE = "relax_lora_meta.json"
_ROWS = torch.contiguous_format


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the sha256 over dtype, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype}|{tuple(tensor.shape)}|".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the sha256 over names, dtypes, shapes and bytes, in name order; for what is kept in files."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:  # hashing lets other threads run
        return combine_digests(dict(zip(tensors, threads.map(tensor_digest, tensors.values()), strict=True)))


def make_adapter(tensors: dict[str, torch.Tensor], *, spec: AdapterSpec, version: int) -> Adapter:
    """Check LoRA tensors and stamp them with a version and a digest.

    Args:
        tensors: HF-PEFT names to lora_A [rank, in] and lora_B [out, rank].
        spec: What they mean.
        version: Policy version they are.

    Raises:
        AdapterError: None at all, half a pair, a rank other than the spec's, or a value that is not finite.
    """
    if not tensors:
        raise AdapterError("the adapter holds no tensors: nothing was trained, or export lost it")
    modules = adapted_modules(tensors)
    for module in modules:
        ranks = tensors[lora_key(module, "A")].shape[-2], tensors[lora_key(module, "B")].shape[-1]
        if ranks != (spec.rank, spec.rank):
            raise AdapterError(f"{module}: lora_A and lora_B have rank {ranks}, the adapter's rank is {spec.rank}")
    found = fingerprints(tensors)
    if found.not_finite:
        raise AdapterError(
            f"{found.not_finite[0]} holds NaN or infinity: the policy has diverged; lower optimizer.learning_rate"
        )
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    return Adapter(WeightsInfo(version, combine_digests(found.digests), modules, num_bytes), spec, tensors)


def peft_config(spec: AdapterSpec, base_model: str) -> dict[str, Any]:
    """Return the content of adapter_config.json as peft reads it."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": spec.dropout,
        "target_modules": list(spec.target_modules),
        "bias": "none",
        "inference_mode": True,
    }


def write_adapter(adapter: Adapter, folder: Path, *, base_model: str, metadata: Mapping[str, Any]) -> None:
    """Write a folder that `peft.PeftModel.from_pretrained` loads, and relax_lora_meta.json beside it.

    Experts may be packed; in the folder each has tensors of its own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    named = unpacked(adapter.tensors)
    # Copies, for safetensors refuses what shares memory, and modules may share their lora_A.
    tensors = {name: tensor.detach().cpu().clone(memory_format=_ROWS) for name, tensor in named.items()}
    save_file(tensors, str(folder / WEIGHTS_FILE), metadata={"format": "pt"})
    config = peft_config(adapter.spec, base_model) | _exclusions(adapter.info.modules)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    meta = {"policy_version": adapter.info.version, "digest": tensors_digest(tensors), **metadata}
    (folder / META_FILE).write_text(json.dumps(meta, indent=2) + "\n")


def _exclusions(modules: Collection[str]) -> dict[str, str]:
    """Keep peft off the part that sees: it may have modules of the same leaf names, for which there are no tensors."""
    multimodal = any("language_model" in module.split(".") for module in modules)
    if not multimodal or any(in_vision_region(module) for module in modules):
        return {}
    return {"exclude_modules": rf"(.+\.)?({'|'.join(sorted(VISION_REGIONS))})\..+"}
