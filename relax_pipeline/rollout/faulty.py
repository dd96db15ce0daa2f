"""An hf engine that fails on demand, to show that its callers notice."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal

from relax_pipeline.rollout.hf import HfEngine
from relax_pipeline.types import Ack, Completion, GenerateRequest

Fault = Literal["die", "hang", "drop_adapter", "serve_stale"]


class FaultyEngine(HfEngine):
    """Behaves like `HfEngine` until told to `break_with` a fault.

    - die: the process exits in the next `generate`.
    - hang: the next `generate` never answers.
    - drop_adapter: activates as asked, and runs the bare base.
    - serve_stale: activates as asked, and goes on running the version before.
    """

    _fault: Fault | None = None
    _previous: int | None = None
    _current: int | None = None

    def break_with(self, fault: Fault) -> None:
        """Fail from now on."""
        self._fault = fault

    def activate(self, version: int) -> Ack:
        """See `Engine.activate`."""
        ack = super().activate(version)
        self._previous, self._current = self._current, version
        return ack

    def generate(self, requests: Sequence[GenerateRequest], *, version: int) -> list[Completion]:
        """See `Engine.generate`."""
        if self._fault == "die":
            os._exit(17)
        if self._fault == "hang":
            time.sleep(3600)
        return super().generate(requests, version=version)

    def _serving(self, version: int | None) -> AbstractContextManager[None]:
        if self._fault == "drop_adapter":
            version = None
        if self._fault == "serve_stale" and self._previous is not None:
            version = self._previous
        return super()._serving(version)
