"""Counts the requests that run, so that what SGLang would not survive under them waits or is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from relax_pipeline.errors import EngineError


class Gate:
    """Requests pass through it side by side; weights are replaced, and memory is freed, while it is empty and shut."""

    def __init__(self, name: str) -> None:
        """`name` is for messages."""
        self._name, self._lock = name, threading.Lock()
        self._inside = 0
        self.asleep = False

    @property
    def busy(self) -> bool:
        """Whether requests are running."""
        return self._inside > 0

    @contextmanager
    def request(self) -> Iterator[None]:
        """Run a request inside this block, once the gate is not shut.

        Raises:
            EngineError: The engine is asleep.
        """
        with self._lock:
            if self.asleep:
                raise EngineError(f"{self._name} is asleep; wake it first")
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1

    @contextmanager
    def shut(self, purpose: str) -> Iterator[None]:
        """Keep new requests waiting until the end of this block.

        Raises:
            EngineError: Requests are running.
        """
        with self._lock:
            if self._inside:
                raise EngineError(f"{self._name} cannot {purpose} while {self._inside} requests run")
            yield
