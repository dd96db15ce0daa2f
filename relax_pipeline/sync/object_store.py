"""Through Ray's object store, in one piece: also to other hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from relax_pipeline.rollout.carried import CarriedTensors
from relax_pipeline.types import Adapter


class ObjectStore:
    """Implements `Transport`."""

    def adapter(self, adapter: Adapter) -> Adapter:
        """See `Transport.adapter`."""
        return replace(adapter, tensors=CarriedTensors.write(adapter.tensors))

    def weights(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> Mapping[str, torch.Tensor]:
        """See `Transport.weights`."""
        return CarriedTensors.write(tensors)

    def forget(self, version: int) -> None:
        """See `Transport.forget`."""

    def close(self) -> None:
        """See `Transport.close`."""
