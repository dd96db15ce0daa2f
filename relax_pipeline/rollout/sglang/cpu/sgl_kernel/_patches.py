"""What has to change in SGLang 0.5.16 for a machine without a GPU, each right after its module is imported."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import multiprocessing
import operator
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

MODELS = frozenset({"llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_5", "qwen3_moe"})
"""Files of sglang/srt/models that are scanned; all of them take seconds."""


def install() -> None:
    """Arrange everything; later imports of SGLang's modules are changed as they come."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    _pin_memory_falls_back()
    _limit_models()
    sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds the modules in `_AFTER_IMPORT` as usual, and changes them once they have run."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        change = _AFTER_IMPORT.get(name)
        if change is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_change(module: ModuleType) -> None:
                execute(module)
                change(module)

            spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def _pin_memory_falls_back() -> None:
    """Without a GPU driver, pinning is a plain copy. Nothing else of torch changes: its factories are special."""
    pin = torch.Tensor.pin_memory

    def pin_memory(tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
        try:
            return pin(tensor, *arguments)
        except RuntimeError:
            return tensor.clone()

    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign, assignment]


def _limit_models() -> None:
    """Use SGLang's own switch to leave out model files."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "srt" / "models"
    others = sorted({file.stem for file in folder.glob("*.py")} - MODELS - {"__init__"})
    os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(others))


def _without_pinned_factories(module: ModuleType) -> None:
    """Give one module a torch whose factories drop `pin_memory`; the real one stays as it is for all others."""

    class Torch(ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    def dropping(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def make(*arguments: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            return factory(*arguments, **options)

        return make

    stand_in = Torch("torch")
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange"):
        setattr(stand_in, name, dropping(getattr(torch, name)))
    module.torch = stand_in  # type: ignore[attr-defined]


def _without_nccl(module: ModuleType) -> None:
    """Make torch's own libnccl absent: SGLang then goes on without it."""

    def absent(*_arguments: Any, **_options: Any) -> None:
        raise OSError("no NCCL on a machine without GPUs")

    module.NCCLLibrary = absent  # type: ignore[attr-defined]


def _forked_children(module: ModuleType) -> None:
    """Fork the scheduler rather than spawn it, which imports everything again; no GPU context speaks against it."""
    context = multiprocessing.get_context("fork")
    kept = {name: value for name, value in vars(multiprocessing).items() if not name.startswith("__")}
    module.mp = SimpleNamespace(**kept | {"Process": context.Process, "Pipe": context.Pipe})  # type: ignore[attr-defined]


def _seeded_attention(module: ModuleType) -> None:
    """Allow per-request seeds with the CPU's attention."""
    module.add_deterministic_attention_backend_choices(["torch_native"])
    module.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])


def _unpadded_sizes(module: ModuleType) -> None:
    """Keep the model's own sizes: padding for CPU matrix units gives adapters buffers that their tensors do not fit."""
    module.adjust_config_with_unaligned_cpu_tp = lambda config, *_arguments: config  # type: ignore[attr-defined]


def _plain_kernels(module: ModuleType) -> None:
    """Per-request seeds come with batch-invariant GPU kernels; float32 on a CPU does without."""
    module.enable_batch_invariant_mode = lambda: None  # type: ignore[attr-defined]


def _torch_hash(module: ModuleType) -> None:
    """MurmurHash3 of (seed, position, column) in torch, where SGLang has a Triton kernel."""
    mask = 0xFFFFFFFF

    def rotate(value: torch.Tensor, bits: int) -> torch.Tensor:
        return (value << bits | value >> (32 - bits)) & mask

    def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        seed, hashed = seed.to(torch.int64)[:, None], torch.zeros(1, 1, dtype=torch.int64)
        for block in (
            seed & mask,
            seed >> 32 & mask,
            positions.to(torch.int64)[:, None],
            columns.to(torch.int64)[None],
        ):
            mixed = rotate(block * 0xCC9E2D51 & mask, 15) * 0x1B873593 & mask
            hashed = (rotate(hashed ^ mixed, 13) * 5 + 0xE6546B64) & mask
        hashed = hashed ^ 16
        hashed = (hashed ^ hashed >> 16) * 0x85EBCA6B & mask
        hashed = (hashed ^ hashed >> 13) * 0xC2B2AE35 & mask
        return hashed ^ hashed >> 16

    module.murmur_hash32 = murmur_hash32  # type: ignore[attr-defined]


def _gated_norm(module: ModuleType) -> None:
    """Norm and gate in torch, where SGLang has a Triton kernel."""

    def forward(norm: Any, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        normed = torch.nn.functional.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)
        return normed * torch.nn.functional.silu(z)

    module.RMSNorm.forward = forward


def _own_heads(module: ModuleType) -> None:
    """Give a delta net the numbers of heads that it has, as `_unpadded_sizes` leaves them."""
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        setattr(module.Qwen3NextConfig, f"{name}_cpu", property(operator.attrgetter(name)))


def _without_processor(module: ModuleType) -> None:
    """A model that sees is served for text: its folder need not hold what prepares pictures."""
    initialise = module.TokenizerManager.init_tokenizer_and_processor

    def initialise_for_text(manager: Any) -> None:
        manager.model_config.is_multimodal = False
        initialise(manager)

    module.TokenizerManager.init_tokenizer_and_processor = initialise_for_text


_AFTER_IMPORT: dict[str, Callable[[ModuleType], None]] = {
    "sglang.srt.lora.layers": _without_pinned_factories,
    "sglang.srt.lora.backend.torch_backend": _without_pinned_factories,
    "sglang.srt.distributed.device_communicators.pynccl": _without_nccl,
    "sglang.srt.entrypoints.engine": _forked_children,
    "sglang.srt.configs.update_config": _unpadded_sizes,
    "sglang.srt.server_args": _seeded_attention,
    "sglang.kernels.ops.attention.fla.layernorm_gated": _gated_norm,
    "sglang.srt.configs.qwen3_next": _own_heads,
    "sglang.srt.managers.tokenizer_manager": _without_processor,
    "sglang.srt.batch_invariant_ops": _plain_kernels,
    "sglang.kernels.ops.sampling.murmur_hash": _torch_hash,
}
