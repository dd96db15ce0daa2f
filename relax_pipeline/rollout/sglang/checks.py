"""What SGLang 0.5.16 would accept and serve wrongly, or die from, refused before it is sent."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from relax_pipeline.errors import AdapterError, EngineError
from relax_pipeline.lora.fingerprint import fingerprints
from relax_pipeline.lora.names import HALVES, adapted_modules, lora_key
from relax_pipeline.lora.packed import leaves
from relax_pipeline.rollout.sglang.launch import LoraRoom
from relax_pipeline.types import Adapter

_COMPANIONS = {
    "q_proj": "v_proj",
    "v_proj": "q_proj",
    "k_proj": "q_proj",
    "up_proj": "gate_proj",
    "in_proj_qkv": "in_proj_z",
    "in_proj_z": "in_proj_qkv",
    "in_proj_b": "in_proj_qkv",
    "in_proj_a": "in_proj_qkv",
}
"""SGLang fuses these; one without the other is refused by it, or ends it. The last two it does not adapt at all."""


def check_adapter(adapter: Adapter, *, room: LoraRoom | None, linears: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse an adapter that the server could not serve as it is.

    Args:
        adapter: In HF names, before `in_sglang_flavour`; its tensors' values are not looked at.
        room: What the server was started with; None: no room for adapters.
        linears: (out, in) of the linear modules in the model's decoder layers, (experts, out, in) of packed ones.

    Raises:
        EngineError: Names the tensor, what it is, and what it would have to be.
    """
    who, spec = f"version {adapter.info.version}", adapter.spec
    if room is None:
        raise EngineError(f"{who}: this engine was started for merged weights, it hosts no adapters")
    if not adapter.tensors:
        raise EngineError(f"{who} holds no tensors; SGLang would serve the bare base under its name")
    if not 1 <= spec.rank <= room.rank:
        raise EngineError(f"{who} has rank {spec.rank}, the engine was started for ranks from 1 to {room.rank}")
    if spec.alpha <= 0:
        raise EngineError(f"{who} has alpha {spec.alpha:g}; SGLang would serve the bare base, or worse")
    try:
        modules = adapted_modules(adapter.tensors)
    except AdapterError as error:
        raise EngineError(f"{who}: {error}; SGLang would leave it out, or end at the first request") from error
    if modules != adapter.info.modules:
        missing, extra = set(adapter.info.modules) - set(modules), set(modules) - set(adapter.info.modules)
        raise EngineError(
            f"{who}: tensors are missing for {sorted(missing)[:4]} and not announced for {sorted(extra)[:4]}"
        )
    for module in modules:
        _check_module(module, adapter, room, linears)


def check_weights(
    tensors: Mapping[str, torch.Tensor], *, version: int, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> None:
    """Refuse weights that are not the model's: other names, shapes, or dtype.

    Raises:
        EngineError: Names the tensor.
    """
    if not tensors:
        raise EngineError(f"version {version}: a part of the model without tensors was sent")
    unknown = sorted(set(tensors) - set(shapes))
    if unknown:
        raise EngineError(f"version {version}: this model has no weights named {unknown[:4]}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shapes[name] or tensor.dtype != dtype:
            raise EngineError(
                f"version {version}: {name} is {tensor.dtype} {tuple(tensor.shape)}, "
                f"the engine's is {dtype} {shapes[name]}"
            )


def digests_of(tensors: Mapping[str, torch.Tensor], *, version: int) -> dict[str, str]:
    """Return each tensor's digest.

    Raises:
        EngineError: A value is NaN or infinite, which SGLang would serve as null logprobs.
    """

    found = fingerprints(tensors)
    if found.not_finite:
        raise EngineError(f"version {version}: {found.not_finite[0]} holds NaN or infinity")
    return found.digests


def _check_module(module: str, adapter: Adapter, room: LoraRoom, linears: Mapping[str, tuple[int, ...]]) -> None:
    who = f"version {adapter.info.version}"
    parent, _, leaf = module.rpartition(".")
    missing = set(leaves(module)) - set(room.leaf_modules)
    if module not in linears:
        raise EngineError(f"{who}: this model has no linear module {module} in a decoder layer")
    if missing:
        raise EngineError(f"{who}: {module} is none of the modules the engine was started for: {room.leaf_modules}")
    companion = _COMPANIONS.get(leaf)
    if companion and f"{parent}.{companion}" not in adapter.info.modules:
        raise EngineError(f"{who}: SGLang hosts {module} only together with {companion}; adapt both or neither")
    *experts, out_features, in_features = linears[module]
    shapes = (*experts, adapter.spec.rank, in_features), (*experts, out_features, adapter.spec.rank)
    for half, shape in zip(HALVES, shapes, strict=True):
        key = lora_key(module, half)
        if key not in adapter.tensors:
            raise EngineError(f"{who}: {module}'s tensors must be named {key}")
        tensor = adapter.tensors[key]
        if tuple(tensor.shape) != shape or not tensor.dtype.is_floating_point:
            raise EngineError(f"{who}: {key} is {tensor.dtype} {tuple(tensor.shape)}, it must be floats of {shape}")
