"""Adapters in the modules of SGLang 0.5.16, which runs a gated delta net's qkv and z as one and adapts no gates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from relax_pipeline.errors import EngineError
from relax_pipeline.lora.gates import GATES, adapted_gates
from relax_pipeline.lora.names import lora_key
from relax_pipeline.types import Adapter

_QKV, _Z, _FUSED = "in_proj_qkv", "in_proj_z", "in_proj_qkvz"
DELTA_NET_LEAVES = frozenset({_FUSED, "out_proj"})
"""SGLang's own names for what it adapts of a gated delta net."""
_REMEDY = "set trainer.kind to megatron, leave in_proj out of lora.target_modules, or set sync.mode to merge"


def sglang_leaves(hf_leaves: Iterable[str]) -> tuple[str, ...]:
    """Return SGLang's leaf names for those of HF, without repeats, in first-seen order."""
    kept = (leaf for leaf in hf_leaves if leaf not in GATES)
    return tuple(dict.fromkeys(_FUSED if leaf in (_QKV, _Z) else leaf for leaf in kept))


def in_sglang_flavour(adapter: Adapter) -> Adapter:
    """Return the adapter in SGLang's modules; the same object if it has no gated delta nets.

    in_proj_qkv and in_proj_z become in_proj_qkvz: their one lora_A [rank, in], and lora_B [out of qkv + out of z, rank]
    with the rows of qkv first. Gates are left out. `info` still describes the adapter that was given.

    Args:
        adapter: In HF names, each module complete.

    Raises:
        EngineError: qkv and z have different lora_A, or a gate's lora_B is not exactly zero; names the module.
    """
    fused = [module for module in adapter.info.modules if module.endswith(f".{_QKV}")]
    gates = [module for module in adapter.info.modules if module.rpartition(".")[2] in GATES]
    if not fused and not gates:
        return adapter
    who = f"version {adapter.info.version}"
    if adapted := adapted_gates(adapter.tensors):
        raise EngineError(f"{who}: {adapted[0]} has a lora_B that is not zero, and SGLang adapts no gates; {_REMEDY}")
    tensors = dict(adapter.tensors)
    for module in gates:
        del tensors[lora_key(module, "A")], tensors[lora_key(module, "B")]
    for module in fused:
        tensors |= _fuse(tensors, module, who)
    spec = replace(adapter.spec, target_modules=sglang_leaves(adapter.spec.target_modules))
    return replace(adapter, spec=spec, tensors=tensors)


def _fuse(tensors: dict[str, torch.Tensor], qkv: str, who: str) -> Mapping[str, torch.Tensor]:
    """Take qkv and its z out of the tensors; return what replaces them."""
    parent = qkv.removesuffix(_QKV)
    qkv_A, z_A = (tensors.pop(lora_key(module, "A")) for module in (qkv, parent + _Z))
    qkv_B, z_B = (tensors.pop(lora_key(module, "B")) for module in (qkv, parent + _Z))
    if qkv_A.dtype != z_A.dtype or not torch.equal(qkv_A, z_A):
        raise EngineError(f"{who}: the lora_A of {qkv} is not that of {_Z}, and SGLang holds one for both; {_REMEDY}")
    return {lora_key(parent + _FUSED, "A"): qkv_A, lora_key(parent + _FUSED, "B"): torch.cat([qkv_B, z_B])}
