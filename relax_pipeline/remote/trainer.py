"""A group of trainer ranks, one process each, called as one trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_pipeline.errors import TrainerError
from relax_pipeline.remote.host import Host, put
from relax_pipeline.trainer.base import Bucket, Payload, Trainer, TrainerInfo
from relax_pipeline.types import TrainingSample


class RemoteTrainer:
    """Implements `Trainer` over one host a rank. Every call goes to all ranks; rank 0 answers."""

    def __init__(
        self, builds: Sequence[Callable[[], Trainer]], *, num_threads: int, num_gpus: float, timeout: float
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

    def save(self, folder: Path) -> None:
        """See `Trainer.save`."""
        self._all("save", folder)

    def load(self, folder: Path) -> None:
        """See `Trainer.load`."""
        self._all("load", folder)

    def close(self) -> None:
        """End all ranks' processes."""
        for host in self._hosts:
            host.kill()

    def pids(self) -> list[int]:
        """Return the ranks' process ids, once all are built."""
        return [host.pid(timeout=self._timeout) for host in self._hosts]

    def _all(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._gather([host.submit(method, *args, **kwargs) for host in self._hosts])

    def _all_split(self, method: str, *args: Any) -> Any:
        pairs = [host.submit_split(method, *args) for host in self._hosts]
        small = self._gather([first for first, _ in pairs])
        return replace(small, content=pairs[0][1])

    def _gather(self, references: Sequence[Any]) -> Any:
        """Wait for all ranks; when one fails the others may wait for it in a collective, so all are ended.

        A rank that fails is often seen through another that loses its connection: the failure that is not about
        a lost peer comes first in rank order only by luck, so all are collected before one is raised.
        """
        answers: list[Any] = []
        failures: list[Exception] = []
        timeout = self._timeout
        for host, reference in zip(self._hosts, references, strict=True):
            try:
                answers.append(host.result(reference, timeout=timeout))
            except Exception as error:  # noqa: BLE001 - raised below, with those of the other ranks
                failures.append(error)
                timeout = 5.0
        if not failures:
            return answers[0]
        if len(self._hosts) > 1:
            self.close()
        cause = min(failures, key=lambda error: "Connection" in str(error) or "no answer" in str(error))
        raise cause
