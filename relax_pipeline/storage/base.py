"""What an object store does: whole objects under string keys, written at once or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store says of an object without sending it."""

    size: int
    """Bytes."""
    sha256: str | None
    """The hex digest its writer declared: a claim, not a check. None where the store keeps no such note."""
    version: str
    """Changes with every write: what `put_bytes(if_match=...)` compares."""


class ObjectStore(Protocol):
    """Objects below one URI. Keys are relative to it, with '/' between parts.

    A reader sees an object whole or not at all, and sees the last one written. All methods raise PublishError where
    the store does not do what it was asked to.
    """

    @property
    def uri(self) -> str:
        """Where the keys start, without a slash at the end."""

    def put_file(self, key: str, path: Path, *, sha256: str, sent: Callable[[int], None]) -> None:
        """Write a file's content. `sha256` goes with it as a note; `sent` is told each number of bytes that arrived."""

    def put_bytes(self, key: str, data: bytes, *, if_none_match: bool = False, if_match: str | None = None) -> bool:
        """Write a small object, on a condition if one is given.

        Args:
            key: Where to.
            data: The content.
            if_none_match: Write only if there is no such object.
            if_match: Write only if the object is still at this version.

        Returns:
            Whether it was written; False: the condition did not hold.
        """

    def get_bytes(self, key: str) -> bytes | None:
        """Return a small object's content; None: there is no such object."""

    def get_file(self, key: str, path: Path) -> None:
        """Write an object's content to a file. The caller checks it: what came may be cut or damaged."""

    def head(self, key: str) -> ObjectInfo | None:
        """Describe an object; None: there is no such object."""

    def sha256(self, key: str) -> str:
        """Read an object back and return the hex sha256 of what came."""

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that start with a prefix, sorted."""

    def delete(self, key: str) -> None:
        """Remove an object, if it is there."""

    def discard_partial(self, prefix: str) -> None:
        """Free what interrupted writes below a prefix left behind; a write still under way there fails."""
