"""What every rollout engine can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from relax_pipeline.types import Ack, Adapter, Completion, GenerateRequest

if TYPE_CHECKING:
    import torch


def adapter_name(version: int) -> str:
    """Return the name an engine holds an adapter under. A name never means two sets of weights."""
    return f"relax_policy_lora-v{version}"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Who this engine is and what it can host."""

    engine_id: str
    incarnation: str
    """Changes at every start: whatever was synced to an earlier incarnation is gone."""
    pid: int
    """Process that serves."""
    base_tensors_digest: str
    """Of the model folder's tensors in the dtype it serves; of those in its memory where it can read them back. The
    probe of version 0 shows that it serves them."""
    leaf_modules: tuple[str, ...]
    """Leaf names of the modules that can carry an adapter, sorted."""
    max_rank: int | None = None
    """None: no limit."""
    expert_adapters: bool = True
    """Whether experts of a mixture can carry adapters."""
    data_parallel_size: int = 1
    """Copies of the model behind the engine; an adapter reaches one of them."""


class Engine(Protocol):
    """One rollout server. Versions are policy versions; each is staged, activated and at last retired.

    Whoever replaces weights makes sure that no request runs meanwhile (`EnginePool.drained`). All methods raise
    EngineError when the engine cannot do what was asked, and leave what it serves as it was.
    """

    def info(self) -> EngineInfo:
        """Say who the engine is; also the health check."""
        ...

    def stage(self, adapter: Adapter) -> None:
        """Load an adapter beside those already held, without serving it."""
        ...

    def load_weights(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> None:
        """Replace model weights by HF name; requests for `version` are then served from them, without an adapter."""
        ...

    def activate(self, version: int) -> Ack:
        """Serve a version that was staged or loaded, and say what it is; see `Ack`."""
        ...

    def retire(self, version: int) -> None:
        """Forget a version that no request will name again."""
        ...

    def generate(self, requests: Sequence[GenerateRequest], *, version: int) -> list[Completion]:
        """Sample one completion for each request from the given version.

        Raises:
            UnknownVersionError: The version is not active here. Nothing else is ever served in its place.
        """
        ...

    def logprobs(self, sequences: Sequence[Sequence[int]], *, version: int | None) -> list[NDArray[np.float32]]:
        """Return [len - 1] logprobs at temperature 1 of each token after the first; version None is the bare base."""
        ...

    def sleep(self) -> None:
        """Free what the engine's settings let go, until `wake`; no request may run or come meanwhile."""
        ...

    def wake(self) -> None:
        """Take it back, and serve what was served before."""
        ...

    def close(self) -> None:
        """Free memory and stop."""
        ...
