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
        streams: int = 1,
        control_timeout: float,
        generate_timeout: float,
    ) -> None:
        """Start the process; `build` makes the engine in it.

        Args:
            build: Makes the engine.
            name: For messages.
            num_threads: torch threads of the process.
            num_gpus: GPUs reserved for it.
            guest_of: Share this process's GPUs instead.
            streams: `generate` calls that the engine takes side by side. 1: it does one thing at a time.
            control_timeout: Seconds for every other call.
            generate_timeout: Seconds for `generate`.
        """
        self._host = Host(
            build,
            name=name,
            error=EngineError,
            num_threads=num_threads,
            num_gpus=num_gpus,
            guest_of=guest_of,
            concurrency=streams if streams == 1 else streams + 1,
        )
        self._control_timeout, self._generate_timeout = control_timeout, generate_timeout
        # A deadline counts from when the engine is free. One that takes several calls can be synced while it generates.
        self._generating = threading.Semaphore(streams)
        self._controlling = self._generating if streams == 1 else threading.Semaphore(1)

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
        with self._generating:
            completions: list[Completion] = self._host.call(
                "generate", requests, version=version, timeout=self._generate_timeout
            )
        return completions

    def logprobs(self, sequences: Sequence[Sequence[int]], *, version: int | None) -> list[NDArray[np.float32]]:
        """See `Engine.logprobs`."""
        logprobs: list[NDArray[np.float32]] = self._control("logprobs", sequences, version=version)
        return logprobs

    def sleep(self) -> None:
        """See `Engine.sleep`."""
        self._control("sleep")

    def wake(self) -> None:
        """See `Engine.wake`."""
        self._control("wake")

    def close(self) -> None:
        """End the engine's process."""
        self._host.kill()

    def control(self, method: str, *args: Any) -> Any:
        """Call a method outside the Protocol, e.g. a test engine's `break_with`."""
        return self._control(method, *args)

    def _control(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with self._controlling:
            return self._host.call(method, *args, timeout=self._control_timeout, **kwargs)
