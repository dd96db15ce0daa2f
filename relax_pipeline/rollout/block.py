"""Tensors in one block of bytes: what passes between processes is the block, and where each tensor lies in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor lies in a block."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Byte."""
    stop: int


class Block(Mapping[str, torch.Tensor], ABC):
    """A mapping from name to tensor that is written once and never again.

    Attributes:
        num_bytes: Gaps included.
        places: By tensor name.
    """

    def __init__(self, places: Mapping[str, Place]) -> None:
        self.places = dict(places)
        self.num_bytes = num_bytes(self.places)

    @abstractmethod
    def whole(self) -> torch.Tensor:
        """Return the block's bytes, as a reader has them."""

    def release(self) -> None:
        """Let the memory go; for the block's maker, once nobody is to open it any more."""

    def __getitem__(self, name: str) -> torch.Tensor:
        place = self.places[name]
        return self.whole()[place.start : place.stop].view(place.dtype).reshape(place.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def num_bytes(places: Mapping[str, Place]) -> int:
    """Return the size of a block, gaps included."""
    return max((place.stop for place in places.values()), default=0)


def lay_out(tensors: Mapping[str, torch.Tensor]) -> dict[str, Place]:
    """Return a place for each tensor, one after the other."""
    places, end = {}, 0
    for name, tensor in tensors.items():
        places[name] = Place(tensor.dtype, tuple(tensor.shape), end, end + tensor.nbytes)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return places


def fill(content: torch.Tensor, places: Mapping[str, Place], tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors of one device into a block's bytes. From a GPU to a host they are gathered first: one copy."""
    device = next(iter(tensors.values())).device
    gathered = content if content.device == device else torch.empty_like(content, device=device)
    for name, place in places.items():
        gathered[place.start : place.stop].copy_(tensors[name].detach().contiguous().reshape(-1).view(torch.uint8))
    if gathered is not content:
        content.copy_(gathered)
