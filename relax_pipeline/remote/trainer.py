"""A group of trainer ranks, one process each, called as one trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_pipeline.errors import RelaxError, TrainerError
from relax_pipeline.remote.host import Host, Place, put, wait_any
from relax_pipeline.trainer.base import Bucket, Payload, Trainer, TrainerInfo
from relax_pipeline.types import TrainingSample

_GRACE_SECONDS = 5.0
"""For the other ranks to report, once one has failed."""


class RemoteTrainer:
    """Implements `Trainer` over one host a rank. Every call goes to all ranks; rank 0 answers."""

    def __init__(
        self, builds: Sequence[Callable[[], Trainer]], *, num_threads: int | None, num_gpus: int, timeout: float
    ) -> None:
        """Start all ranks; `builds` makes them, in rank order."""
        self._timeout = timeout
        self._hosts = [
            Host(
                build,
                name=f"trainer rank {rank}",
                error=TrainerError,
                num_threads=num_threads,
                num_gpus=num_gpus,
            )
            for rank, build in enumerate(builds)
        ]

    def info(self) -> TrainerInfo:
        """See `Trainer.info`."""
        info: TrainerInfo = self._all("info")
        return info

    def policy_version(self) -> int:
        """See `Trainer.policy_version`."""
        version: int = self._all("policy_version")
        return version

    def logprobs(
        self, samples: Sequence[TrainingSample], *, temperature: float, adapter_enabled: bool = True
    ) -> list[NDArray[np.float32]]:
        """See `Trainer.logprobs`."""
        logprobs: list[NDArray[np.float32]] = self._all(
            "logprobs", put(list(samples)), temperature=temperature, adapter_enabled=adapter_enabled
        )
        return logprobs

    def forward_backward(self, samples: Sequence[TrainingSample], *, temperature: float) -> dict[str, float]:
        """See `Trainer.forward_backward`."""
        metrics: dict[str, float] = self._all("forward_backward", put(list(samples)), temperature=temperature)
        return metrics

    def optim_step(self) -> dict[str, float]:
        """See `Trainer.optim_step`."""
        metrics: dict[str, float] = self._all("optim_step")
        return metrics

    def export_adapter(self) -> Payload:
        """See `Trainer.export_adapter`; the content stays with rank 0 until an engine opens it."""
        payload: Payload = self._all_split("export_adapter")
        return payload

    def bucket_names(self, buffer_bytes: int) -> list[list[str]]:
        """See `Trainer.bucket_names`."""
        names: list[list[str]] = self._all("bucket_names", buffer_bytes)
        return names

    def export_weights(self, names: Sequence[str]) -> Bucket:
        """See `Trainer.export_weights`; the content stays with rank 0 until an engine opens it."""
        bucket: Bucket = self._all_split("export_weights", list(names))
        return bucket

    def adapter_norms(self) -> dict[str, float]:
        """See `Trainer.adapter_norms`."""
        norms: dict[str, float] = self._all("adapter_norms")
        return norms

    def release_memory(self) -> None:
        """See `Trainer.release_memory`."""
        self._all("release_memory")

    def save(self, folder: Path) -> None:
        """See `Trainer.save`."""
        self._all("save", folder)

    def begin_save(self, folder: Path) -> None:
        """See `Trainer.begin_save`."""
        self._all("begin_save", folder)

    def finish_save(self) -> None:
        """See `Trainer.finish_save`."""
        self._all("finish_save")

    def load(self, folder: Path) -> None:
        """See `Trainer.load`."""
        self._all("load", folder)

    def start_from(self, folder: Path) -> None:
        """See `Trainer.start_from`."""
        self._all("start_from", folder)

    def close(self) -> None:
        """End all ranks' processes."""
        for host in self._hosts:
            host.kill()

    def pids(self) -> list[int]:
        """Return the ranks' process ids, once all are built."""
        return [host.pid(timeout=self._timeout) for host in self._hosts]

    def places(self) -> list[Place]:
        """Return where the ranks run, so that engines may share their GPUs."""
        return [host.place(timeout=self._timeout) for host in self._hosts]

    def _all(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._gather([host.submit(method, *args, **kwargs) for host in self._hosts])

    def _all_split(self, method: str, *args: Any) -> Any:
        pairs = [host.submit_split(method, *args) for host in self._hosts]
        small = self._gather([first for first, _ in pairs])
        return replace(small, content=pairs[0][1])

    def _gather(self, references: Sequence[Any]) -> Any:
        """Wait for all ranks. When one fails the others may wait for it in a collective, so all are ended."""
        ranks = {reference: rank for rank, reference in enumerate(references)}
        answers: dict[int, Any] = {}
        failures: dict[int, RelaxError] = {}
        deadline = time.monotonic() + self._timeout
        while ranks:
            done = wait_any(list(ranks), timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                break
            rank = ranks.pop(done[0])
            try:
                answers[rank] = self._hosts[rank].result(done[0], timeout=self._timeout)
            except RelaxError as error:
                failures[rank] = error
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if len(answers) == len(self._hosts):
            return answers[0]
        if len(self._hosts) > 1 or not failures:
            self.close()
        raise self._cause(failures, silent=sorted(ranks.values()))

    def _cause(self, failures: Mapping[int, RelaxError], *, silent: Sequence[int]) -> RelaxError:
        """Return the failure to report. One about a lost peer is a consequence, however early it came."""
        if not failures:
            names = ", ".join(map(str, silent))
            return TrainerError(
                f"trainer rank {names} gave no answer within {self._timeout:g} s; all ranks were killed"
            )
        rank, error = min(failures.items(), key=lambda item: "Connection" in str(item[1]))
        if len(self._hosts) == 1 or f"rank {rank}" in str(error):
            return error
        named = type(error)(f"trainer rank {rank}: {error}")
        named.__cause__ = error
        return named
