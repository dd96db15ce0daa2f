"""How tensors leave the trainer's process: packed there into what passes any queue, opened where an engine reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from relax_pipeline.types import Adapter


class Transport(Protocol):
    """Lives in the process of the trainer's first rank. What is packed is a mapping still, and passes any queue."""

    def adapter(self, adapter: Adapter) -> Adapter:
        """Return the adapter with its tensors packed."""
        ...

    def weights(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> Mapping[str, torch.Tensor]:
        """Return one bucket of a version's weights packed."""
        ...

    def forget(self, version: int) -> None:
        """Drop what was packed of a version that no engine will be sent any more."""
        ...

    def close(self) -> None:
        """Drop everything."""
        ...
