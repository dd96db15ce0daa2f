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

from relax_pipeline.errors import EngineError
from relax_pipeline.rollout.block import Block
from relax_pipeline.rollout.device import DeviceTensors
from relax_pipeline.rollout.received import ReceivedTensors
from relax_pipeline.rollout.shared import SharedTensors

FORMAT = "flattened_bucket"


class _Opened:
    """Unpickles as the block's bytes, mapped in the process that reads it; privately where they are the host's."""

    def __init__(self, tensors: Block) -> None:
        self._tensors = tensors

    def __reduce__(self) -> tuple[Any, ...]:
        match self._tensors:
            case DeviceTensors():
                return self._tensors.opening()
            case SharedTensors():
                opening = partial(torch.from_file, dtype=torch.uint8)
                return opening, (self._tensors.path, False, self._tensors.num_bytes)
            case other:
                raise EngineError(f"{type(other).__name__} cannot be mapped by another process")


def bucket(tensors: Block, names: Mapping[str, str] | None = None) -> str:
    """Return the base64 text of a bucket; the receiver must be on this host, and on this GPU if the block is.

    Args:
        tensors: What is sent.
        names: What the receiver calls them; others keep their names.
    """
    metadata = [
        SimpleNamespace(
            name=(names or {}).get(name, name),
            shape=torch.Size(place.shape),
            dtype=place.dtype,
            start_idx=place.start,
            end_idx=place.stop,
            numel=place.stop - place.start,
        )
        for name, place in tensors.places.items()
    ]
    content = {"flattened_tensor": _Opened(tensors), "metadata": metadata}
    return base64.b64encode(pickle.dumps(content, protocol=5)).decode()


@contextmanager
def mappable(tensors: Mapping[str, torch.Tensor]) -> Iterator[Block]:
    """Give the tensors as a block that the server can map; one made here goes when the server has read it.

    SGLang reads a block on the GPU before it answers. Of one in the host's memory it keeps what it has mapped.
    """
    if isinstance(tensors, (SharedTensors, DeviceTensors)):
        yield tensors
    elif isinstance(tensors, ReceivedTensors):
        yield tensors.fetch()
    else:
        on_gpu = next(iter(tensors.values())).is_cuda
        block = DeviceTensors.write(tensors) if on_gpu else SharedTensors.write(tensors)
        try:
            yield block
        finally:
            block.release()
