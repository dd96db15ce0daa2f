"""Elementwise arithmetic as one kernel on a GPU, which else passes over its tensors once for every operation."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar, cast

import torch

from relax_pipeline.errors import TrainerError

F = TypeVar("F", bound=Callable[..., Any])


def fused(function: F) -> F:
    """Return a function that runs compiled where its first tensor is on a GPU, and as it stands on a CPU.

    It is for functions of tensors that autograd does not look into. Their first sizes may differ from call to call, as
    packed lengths do; every other size costs a compilation when it differs.
    """
    compiled = cache(lambda: compile_for_any_length(function))

    @wraps(function)
    def run(*tensors: torch.Tensor) -> Any:
        return compiled()(*tensors) if tensors[0].is_cuda else function(*tensors)

    return cast(F, run)


def has_c_compiler() -> bool:
    """Whether Triton finds what it builds its launchers with."""
    return bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))


def compile_for_any_length(function: F) -> F:
    """Return the function compiled, for tensors on any device.

    Raises:
        TrainerError: No C compiler is installed.
    """
    if not has_c_compiler():
        raise TrainerError(
            "found no C compiler, of which Triton needs one to build the trainer's GPU kernels; "
            "install gcc or clang, or name one in the environment variable CC"
        )
    compiled = torch.compile(
        function,
        dynamic=False,  # other sizes than the first: reads are wide where rows are known to be aligned
        fullgraph=True,
        # Kernels picked by timing would differ from process to process, and add up in another order.
        options={"deterministic": True, "triton.autotune_pointwise": False},
    )

    @wraps(function)
    def run(*tensors: torch.Tensor) -> Any:
        return compiled(*map(_of_any_length, tensors))

    return cast(F, run)


def _of_any_length(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias that leaves the first size open, and has no gradient, for which it would be compiled anew."""
    alias = tensor.detach()
    if alias.ndim:
        torch._dynamo.maybe_mark_dynamic(alias, 0)
    return alias
