"""Stand-in for SGLang's compiled kernels, so that an unchanged SGLang 0.5.16 serves small models on a CPU.

The folder above this one goes on PYTHONPATH of the server's processes only. SGLang imports `sgl_kernel` early in each
of them, which is when the rest is arranged. A kernel that is not here raises when it is called: nothing is made up.
"""

from __future__ import annotations

from typing import Any

import torch

from . import _patches
from .mamba import install as _install_delta_net

__version__ = "0.0.0+cpu"


def assign_req_to_token_pool_cpu(
    request_rows: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    _width: int,
) -> None:
    """Write each request's new cache slots, which lie one after another, into its row of the table."""
    taken = 0
    for row, start, end in zip(request_rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = slots[taken : taken + end - start].to(table.dtype)
        taken += end - start


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)

    def kernel(*_arguments: Any, **_options: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU version here; serve this model on a GPU")

    return kernel


_patches.install()
_install_delta_net()
