"""What is installed here, and what can therefore run."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch

from relax_pipeline.fused import has_c_compiler

State = Literal["ok", "note", "missing"]

TRIED_TOGETHER = {
    "torch": "2.11.0",
    "transformers": "5.12.1",
    "peft": "0.21.2",
    "megatron-core": "0.19.2",
    "megatron-bridge": "0.6.2",
    "sglang": "0.5.16",
}
"""Versions that have run together, on a CPU and on an H200. SGLang's requests depend on its exact version."""
_BACKENDS = {
    "trainer.kind fsdp": ("torch", "transformers", "peft"),
    "trainer.kind megatron": ("megatron-core", "megatron-bridge"),
    "engine.kind hf": ("torch", "transformers", "peft"),
    "engine.kind sglang": ("sglang",),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    state: State
    detail: str


def diagnose() -> list[Finding]:
    """Look at packages, backends and GPUs; starts nothing and takes no GPU memory."""
    return [*_packages(), *_backends(), *_gpus(), *_compiler()]


def _packages() -> Iterator[Finding]:
    for name, tried in TRIED_TOGETHER.items():
        found = _installed(name)
        if found is None:
            yield Finding(name, "missing", f"not installed; {tried} is the version that was tried")
        elif found.split("+")[0] != tried:
            yield Finding(name, "note", f"{found}; {tried} is the version that was tried")
        else:
            yield Finding(name, "ok", found)


def _backends() -> Iterator[Finding]:
    for backend, needs in _BACKENDS.items():
        absent = [name for name in needs if _installed(name) is None]
        if absent:
            yield Finding(backend, "missing", f"needs {', '.join(absent)}: see Backends in the README")
        else:
            yield _sglang(backend) if backend.endswith("sglang") else Finding(backend, "ok", "can start")
    yield Finding("engine.kind vllm", "missing", "not available yet; use hf or sglang")


def _compiler() -> Iterator[Finding]:
    """Look for what trainers on a GPU need to build their kernels; on a CPU they build none."""
    if not torch.cuda.is_available():
        return
    if has_c_compiler():
        yield Finding("C compiler", "ok", "trainers can build their GPU kernels")
    else:
        yield Finding("C compiler", "missing", "trainers build GPU kernels with it: install gcc or clang, or set CC")


def _sglang(backend: str) -> Finding:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    if not (Path(spec.origin).parent / "srt" / "__pycache__").is_dir():
        return Finding(
            backend, "note", "can start, a minute late: install with --compile-bytecode, or its files are compiled anew"
        )
    if not torch.cuda.is_available():
        return Finding(backend, "note", "can start on this CPU, with small models of the Llama and Qwen families")
    if importlib.util.find_spec("torch_memory_saver") is None:
        return Finding(backend, "note", "can start; engine.offload needs the package torch_memory_saver")
    return Finding(backend, "ok", "can start")


def _gpus() -> Iterator[Finding]:
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield Finding(f"GPU {index}", "ok", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    if not torch.cuda.is_available():
        yield Finding("GPU", "note", "none that torch can use: everything runs on the CPU")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
