"""Tensors as SGLang 0.5.16 takes them over HTTP: a pickle that says where they lie, without the tensors."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from relax_pipeline.rollout.received import ReceivedTensors
from relax_pipeline.rollout.shared import SharedTensors

FORMAT = "flattened_bucket"


class _Mapped:
    """Unpickles as the block's bytes, mapped privately in the process that reads it."""

    def __init__(self, tensors: SharedTensors) -> None:
        self._tensors = tensors

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(torch.from_file, dtype=torch.uint8), (self._tensors.path, False, self._tensors.num_bytes)


def bucket(tensors: SharedTensors) -> str:
    """Return the base64 text of a bucket; the receiver must be on this host."""
    metadata = [
        SimpleNamespace(
            name=name,
            shape=torch.Size(place.shape),
            dtype=place.dtype,
            start_idx=place.start,
            end_idx=place.stop,
            numel=place.stop - place.start,
        )
        for name, place in tensors.places.items()
    ]
    content = {"flattened_tensor": _Mapped(tensors), "metadata": metadata}
    return base64.b64encode(pickle.dumps(content, protocol=5)).decode()


@contextmanager
def in_host_memory(tensors: Mapping[str, torch.Tensor]) -> Iterator[SharedTensors]:
    """Give the tensors as a block that the server can map; one made here goes when the server lets go of it."""
    if isinstance(tensors, SharedTensors):
        yield tensors
    elif isinstance(tensors, ReceivedTensors):
        yield tensors.fetch()
    else:
        block = SharedTensors.write(tensors)
        try:
            yield block
        finally:
            block.release()
