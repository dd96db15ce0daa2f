"""The patches in force while the trainer runs: for what a machine lacks, and for speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.bridge.models.hf_pretrained.state import SafeTensorsStateSource
from megatron.bridge.peft import module_matcher
from megatron.bridge.peft import utils as peft_utils
from megatron.bridge.peft.lora_layers import LoRALinear
from megatron.bridge.peft.utils import GroupedExpertLinearAdapter
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel import random as parallel_random
from megatron.core.transformer import mlp
from megatron.core.transformer.moe import experts, shared_experts, token_dispatcher
from torch.overrides import TorchFunctionMode

from relax_pipeline.trainer.megatron import delta_net, grouped, lora_forward, swiglu
from relax_pipeline.trainer.megatron.compat import HAS_DELTA_KERNELS, Patch, patched
from relax_pipeline.trainer.megatron.experts import PortableColumnGroupedLinear, PortableRowGroupedLinear
from relax_pipeline.trainer.megatron.reading import load_tensors
from relax_pipeline.trainer.megatron.rotary import rotate_packed

_CPU = torch.device("cpu")
FASTER = [
    Patch(SafeTensorsStateSource, "load_tensors", load_tensors, "it parses a file's header for each tensor"),
    Patch(rope_utils, "_apply_rotary_pos_emb_thd", rotate_packed, "it goes through the sequences one by one"),
    Patch(LoRALinear, "forward", lora_forward.forward, "it scales an adapter's output and adds it apart"),
    Patch(GroupedExpertLinearAdapter, "forward", grouped.adapter_forward, "it cuts the tokens into a slice an expert"),
    *(
        Patch(module, "bias_swiglu_impl", swiglu.swiglu, "it is compiled anew for each shape")
        for module in (mlp, shared_experts)
    ),
    *(
        Patch(module, "weighted_bias_swiglu_impl", swiglu.weighted_swiglu, "it is compiled anew for each shape")
        for module in (mlp, experts)
    ),
]
"""In force everywhere: nothing is missing without it, but time."""


@contextmanager
def runnable(device: torch.device, *, transformer_engine: bool) -> Iterator[None]:
    """Run Megatron on this device, with or without Transformer Engine's layers."""
    cuda = device.type == "cuda"
    here = patches(cuda=cuda, transformer_engine=transformer_engine, delta_kernels=cuda and HAS_DELTA_KERNELS)
    with ExitStack() as stack:
        stack.enter_context(patched([*here, *FASTER]))
        if not cuda:
            stack.enter_context(_CudaIsCpu())
        yield


def patches(*, cuda: bool, transformer_engine: bool, delta_kernels: bool) -> list[Patch]:
    """Return what a machine needs; nothing where it has all of these."""
    return [
        *([] if cuda else _without_cuda()),
        *([] if transformer_engine else _without_transformer_engine()),
        *([] if delta_kernels else delta_net.patches()),
    ]


def _without_transformer_engine() -> list[Patch]:
    reason = "megatron.core fills in for these classes with mock objects, at which isinstance() raises"
    classes = [
        Patch(module, name, type(name, (torch.nn.Module,), {}), reason)
        for module in (peft_utils, module_matcher)
        for name in ("TELinear", "TEColumnParallelLinear", "TELayerNormColumnParallelLinear", "TERowParallelLinear")
        if hasattr(module, name)
    ]
    column, row = (PortableColumnGroupedLinear,), (PortableRowGroupedLinear,)
    grouped = "adapters for single experts exist for grouped experts only, which it knows by their class"
    return [
        *classes,
        Patch(peft_utils, "TECL", column, grouped),
        Patch(peft_utils, "TERL", row, grouped),
        Patch(peft_utils, "HAVE_TE", True, grouped),
    ]


def _without_cuda() -> list[Patch]:
    dispatcher = token_dispatcher.maybe_move_tensor_to_cpu
    generator = "dropout under tensor parallelism and recomputation save and restore the GPU's generator"
    return [
        Patch(torch.cuda, "current_device", lambda: _CPU, "used as the device of new tensors"),
        Patch(torch.cuda, "synchronize", _nothing, "pipeline messages and checkpoints wait for the device"),
        Patch(torch.cuda, "current_stream", _Stream, "the gradient reduction waits on a stream"),
        Patch(torch.cuda, "Stream", _Stream, "the expert dispatcher owns one; a class, for it is an annotation too"),
        Patch(torch.cuda, "manual_seed", torch.manual_seed, generator),
        Patch(torch.cuda, "get_rng_state", _rng_state, generator),
        Patch(parallel_random, "_get_cuda_rng_state", _rng_state, generator),
        Patch(parallel_random, "_set_cuda_rng_state", _set_rng_state, generator),
        Patch(
            token_dispatcher,
            "maybe_move_tensor_to_cpu",
            _host_splits(dispatcher),
            "gloo wants the sizes of an all-to-all as integers, and they stay tensors when on the CPU already",
        ),
    ]


class _CudaIsCpu(TorchFunctionMode):
    """Tensors asked for on a GPU by name are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs = kwargs | {"device": _CPU}
        return func(*args, **kwargs)


class _Stream:
    """A stream of a device that does everything at once, and an event on it."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> _Stream:
        return self

    def synchronize(self) -> None: ...


def _nothing(*_: Any) -> None: ...


def _rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _host_splits(original: Callable[..., Any]) -> Callable[..., Any]:
    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if isinstance(tensor, torch.Tensor) and as_numpy and tensor.device.type == "cpu":
            return tensor.detach().numpy()
        return original(tensor, as_numpy=as_numpy, record_stream=record_stream)

    return to_host
