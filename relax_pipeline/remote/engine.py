"""An engine in a process of its own, with the same methods and a deadline on each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_pipeline.errors import EngineError
from relax_pipeline.remote.host import Host, Place
from relax_pipeline.rollout.base import Engine, EngineInfo
from relax_pipeline.types import Ack, Completion, GenerateRequest


class RemoteEngine:
    """Implements `Engine` over a host. Weights may be handles: they are opened in the engine's process only."""

    def __init__(
        self,
        build: Callable[[], Engine],
        *,
        name: str,
        num_threads: int | None,
        num_gpus: int,
        guest_of: Place | None = None,
        control_timeout: float,
        generate_timeout: float,
    ) -> None:
        self._host = Host(
            build, name=name, error=EngineError, num_threads=num_threads, num_gpus=num_gpus, guest_of=guest_of
        )
        self._control_timeout, self._generate_timeout = control_timeout, generate_timeout
        # The engine does one thing at a time: a deadline counts from when it is free.
        self._turn = threading.Lock()

    def info(self) -> EngineInfo:
        """See `Engine.info`."""
        info: EngineInfo = self._control("info")
        return info

    def stage(self, adapter: Any) -> None:
        """See `Engine.stage`."""
        self._control("stage", adapter)

    def load_weights(self, tensors: Mapping[str, Any] | Any, *, version: int) -> None:
        """See `Engine.load_weights`."""
        self._control("load_weights", tensors, version=version)

    def activate(self, version: int) -> Ack:
        """See `Engine.activate`."""
        ack: Ack = self._control("activate", version)
        return ack

    def retire(self, version: int) -> None:
        """See `Engine.retire`."""
        self._control("retire", version)

    def generate(self, requests: Sequence[GenerateRequest], *, version: int) -> list[Completion]:
        """See `Engine.generate`."""
        with self._turn:
            completions: list[Completion] = self._host.call(
                "generate", requests, version=version, timeout=self._generate_timeout
            )
        return completions

    def logprobs(self, sequences: Sequence[Sequence[int]], *, version: int | None) -> list[NDArray[np.float32]]:
        """See `Engine.logprobs`."""
        logprobs: list[NDArray[np.float32]] = self._control("logprobs", sequences, version=version)
        return logprobs

    def close(self) -> None:
        """End the engine's process."""
        self._host.kill()

    def control(self, method: str, *args: Any) -> Any:
        """Call a method outside the Protocol, e.g. a test engine's `break_with`."""
        return self._control(method, *args)

    def _control(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with self._turn:
            return self._host.call(method, *args, timeout=self._control_timeout, **kwargs)
