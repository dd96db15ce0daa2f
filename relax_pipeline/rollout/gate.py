"""A gate before the engines: work passes through it, or is held back while nothing may run on them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Any number of threads may be inside at once; one thread at a time may close it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._is_closed = False

    @contextmanager
    def passed(self) -> Iterator[None]:
        """Wait until the gate is open, and be inside for the block."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_closed)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Let nobody in, wait for those inside, and keep it empty for the block."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: self._inside == 0)
        try:
            yield
        finally:
            with self._changed:
                self._is_closed = False
                self._changed.notify_all()
