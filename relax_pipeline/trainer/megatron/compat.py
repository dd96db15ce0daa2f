"""What Megatron-Core 0.19.2 and Megatron-Bridge 0.6.2 take for granted and a machine may lack.

Nothing here is in force for longer than a `with` block, and on a machine with CUDA and Transformer Engine nothing
is in force at all but the faster rotary embedding: `patches` is empty.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NamedTuple

import torch

HAS_CUDA = torch.cuda.is_available()
HAS_TRANSFORMER_ENGINE = importlib.util.find_spec("transformer_engine") is not None
HAS_DELTA_KERNELS = importlib.util.find_spec("fla") is not None


class Patch(NamedTuple):
    """One attribute that is something else inside `patched`."""

    owner: Any
    name: str
    value: Any
    reason: str


@contextmanager
def patched(patches: Sequence[Patch]) -> Iterator[None]:
    """Set the attributes, and put back what was there."""
    with ExitStack() as stack:
        for patch in patches:
            stack.callback(setattr, patch.owner, patch.name, getattr(patch.owner, patch.name))
            setattr(patch.owner, patch.name, patch.value)
        yield


@contextmanager
def importable() -> Iterator[None]:
    """Let megatron be imported inside this block; what it needs at import and not later goes with the block."""
    logging.getLogger("megatron").setLevel(logging.ERROR)  # it reports each optional package it does not find
    if not HAS_CUDA:
        # Megatron compiles its fused functions at import; a machine without a GPU may have no compiler either.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # Megatron's import puts a function of its own here, and from then on whoever unpickles a tensor of ours, an engine
    # for instance, would have to import Megatron.
    load = Patch(torch.storage, "_load_from_bytes", torch.storage._load_from_bytes, "put back after the import")
    finder = _LoraLayersFinder()
    if not HAS_TRANSFORMER_ENGINE:
        sys.meta_path.insert(0, finder)
    try:
        with patched([load]):
            yield
    finally:
        if not HAS_TRANSFORMER_ENGINE:
            sys.meta_path.remove(finder)


class _LoraLayersFinder(importlib.abc.MetaPathFinder):
    """megatron.bridge.peft.lora_layers imports Transformer Engine at its top, for a class that plain LoRA never uses.

    It alone sees an empty stand-in while its body runs: with a lasting one, every other module would believe that
    Transformer Engine is there.
    """

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname != "megatron.bridge.peft.lora_layers":
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _WithStandIn(spec.loader)
        return spec


class _WithStandIn(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        engine, layers = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
        for name in ("Linear", "LayerNormLinear", "GroupedLinear"):  # isinstance() of nothing
            setattr(layers, name, type(name, (torch.nn.Module,), {}))
        layers.ops = ModuleType("transformer_engine.pytorch.ops")  # type: ignore[attr-defined]
        layers.ops.Sequential = type("Sequential", (torch.nn.Module,), {})
        engine.pytorch = layers  # type: ignore[attr-defined]
        sys.modules |= {engine.__name__: engine, layers.__name__: layers}
        try:
            self._loader.exec_module(module)
        finally:
            del sys.modules[engine.__name__], sys.modules[layers.__name__]
