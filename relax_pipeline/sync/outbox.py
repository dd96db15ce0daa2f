"""A trainer whose exports leave its process by the configured transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from relax_pipeline.config import RunConfig
from relax_pipeline.models import resolve_device
from relax_pipeline.sync.disk import Disk
from relax_pipeline.sync.ipc import Ipc
from relax_pipeline.sync.nccl import Nccl
from relax_pipeline.sync.object_store import ObjectStore
from relax_pipeline.sync.transport import Transport, on_one_gpu, transport_kind
from relax_pipeline.trainer.base import Bucket, Payload, RankLayout, Trainer
from relax_pipeline.trainer.make import make_trainer


class Outbox:
    """One rank of a trainer; implements `Trainer`. The first rank packs what is exported, the others drop it."""

    def __init__(self, trainer: Trainer, transport: Transport | None, *, keep_versions: int) -> None:
        """Wrap a rank.

        Args:
            trainer: The rank.
            transport: None on every rank but the first.
            keep_versions: Versions whose exports may still be sent to an engine.
        """
        self._trainer, self._transport, self._keep_versions = trainer, transport, keep_versions
        self._exported: list[int] = []

    def export_adapter(self) -> Payload:
        """See `Trainer.export_adapter`."""
        payload = self._trainer.export_adapter()
        self._count(payload.info.version)
        return replace(payload, content=self._transport.adapter(payload.content) if self._transport else None)

    def export_weights(self, names: Sequence[str]) -> Bucket:
        """See `Trainer.export_weights`."""
        bucket, version = self._trainer.export_weights(names), self._trainer.policy_version()
        self._count(version)
        packed = self._transport.weights(bucket.content, version=version) if self._transport else None
        return replace(bucket, content=packed)

    def close(self) -> None:
        """See `Trainer.close`."""
        if self._transport:
            self._transport.close()
        self._trainer.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def _count(self, version: int) -> None:
        if version not in self._exported:
            self._exported.append(version)
        while self._transport and len(self._exported) > self._keep_versions:
            self._transport.forget(self._exported.pop(0))


def make_outbox(config: RunConfig, layout: RankLayout) -> Trainer:
    """Build this process's rank of the configured trainer, with the configured transport."""
    # Engines keep the adapters in use, or one model, and are sent the next before the oldest goes.
    kept = config.rollout.versions_in_use + 1 if config.sync.mode == "adapter" else 1
    transport = make_transport(config) if layout.rank == 0 else None
    outbox: Any = Outbox(make_trainer(config, layout), transport, keep_versions=kept)
    trainer: Trainer = outbox
    return trainer


def make_transport(config: RunConfig) -> Transport:
    """Build the configured transport, in the process of the trainer's first rank."""
    on_gpus = resolve_device(config.trainer.device).type == "cuda"
    match transport_kind(config, on_gpus=on_gpus):
        case "object_store":
            return ObjectStore()
        case "ipc":
            return Ipc(same_gpu=on_one_gpu(config))
        case "disk":
            run = Path(config.output_dir).expanduser().resolve() / config.run_name
            return Disk(run / "sync", base_model=config.model.path)
        case "nccl":
            return Nccl(
                backend="nccl" if on_gpus else "gloo",
                buffer_bytes=config.sync.buffer_bytes,
                timeout=config.sync.timeout_seconds,
            )
