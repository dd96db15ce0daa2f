"""What every trainer can do. A trainer is one rank; a group of ranks is driven by calling all of them alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from relax_pipeline.types import TrainingSample, WeightsInfo


@dataclass(frozen=True, slots=True)
class RankLayout:
    """This process's place among the trainer's ranks."""

    rank: int = 0
    world_size: int = 1
    init_method: str | None = None
    """file:// or tcp:// address at which the ranks meet; None for a single process."""


@dataclass(frozen=True, slots=True)
class TrainerInfo:
    """What was built."""

    base_tensors_digest: str
    """Of the base's tensors as loaded, comparable with `EngineInfo.base_tensors_digest`."""
    modules: tuple[str, ...]
    """Full names of the adapted modules; empty when all weights train."""
    num_trainable: int
    """Parameters that train."""
    num_parameters: int
    """Parameters of the base."""
    device: str


@dataclass(frozen=True, slots=True)
class Payload:
    """Weights on their way to the engines."""

    info: WeightsInfo
    content: Any
    """An `Adapter`, or a handle that becomes one where an engine receives it."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A part of a whole model's weights on its way to the engines."""

    digests: dict[str, str]
    """Tensor name to digest."""
    num_bytes: int
    num_unmoved: int
    """Entries that a non-zero delta left as they were, lost to rounding."""
    num_folded: int
    """Entries with a non-zero delta."""
    content: Any
    """A mapping from HF name to tensor, or a handle that becomes one where an engine receives it."""


class Trainer(Protocol):
    """Owns the policy. `policy_version` is the number of optimizer steps taken."""

    def info(self) -> TrainerInfo:
        """Say what was built."""
        ...

    def policy_version(self) -> int:
        """Return the number of optimizer steps taken."""
        ...

    def logprobs(
        self, samples: Sequence[TrainingSample], *, temperature: float, adapter_enabled: bool = True
    ) -> list[NDArray[np.float32]]:
        """Return [T] logprobs of each sample's completion tokens, under the base when the adapter is off."""
        ...

    def forward_backward(self, samples: Sequence[TrainingSample], *, temperature: float) -> dict[str, float]:
        """Add the gradient of one update's samples, normalised over all of them; return the loss metrics.

        Raises:
            TrainerError: The loss or a gradient is not finite, or no token trains.
        """
        ...

    def optim_step(self) -> dict[str, float]:
        """Clip, step, clear the gradient, raise the policy version; return grad_norm and learning_rate."""
        ...

    def export_adapter(self) -> Payload:
        """Return a copy of the adapter in HF-PEFT names, in the dtype engines compute in.

        Raises:
            AdapterError: The adapter is not finite.
        """
        ...

    def bucket_names(self, buffer_bytes: int) -> list[list[str]]:
        """Split the whole model's tensor names into buckets of at most buffer_bytes (a larger tensor alone)."""
        ...

    def export_weights(self, names: Sequence[str]) -> Bucket:
        """Return copies of some weights by HF name, the adapter folded in; the trainer's own stay as they are."""
        ...

    def adapter_norms(self) -> dict[str, float]:
        """Return the Frobenius norm of the delta per kind of module."""
        ...

    def save(self, folder: Path) -> None:
        """Write `trainer/` (sharded state, every rank its part) and `adapter/` (PEFT) into a checkpoint folder.

        Raises:
            CheckpointError: It cannot be written.
        """
        ...

    def begin_save(self, folder: Path) -> None:
        """Begin a save of what is held now. It is written while other calls go on, and done after `finish_save`.

        Raises:
            CheckpointError: It cannot be written.
        """
        ...

    def finish_save(self) -> None:
        """Wait until the save that was begun is written.

        Raises:
            CheckpointError: It could not be written, on any rank.
        """
        ...

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote, under this or another number of ranks.

        Raises:
            CheckpointError: Something this trainer holds is missing from the folder, or has another shape.
        """
        ...

    def start_from(self, folder: Path) -> None:
        """Take the values of a PEFT adapter as those of version 0, before the first step.

        Raises:
            AdapterError: It is unreadable, or of another rank, alpha, base, or set of modules.
        """
        ...

    def release_memory(self) -> None:
        """Give the GPU back what is kept of it for reuse, before engines that share it take their memory again."""
        ...

    def close(self) -> None:
        """Free memory and leave the process group."""
        ...
