"""What is sent in each mode: an adapter beside the base, or the whole model with the adapter folded in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from relax_pipeline.lora.fingerprint import combine_digests
from relax_pipeline.rollout.base import Engine
from relax_pipeline.trainer.base import Trainer
from relax_pipeline.types import WeightsInfo


class Shipment(Protocol):
    """Weights of one version, exported and ready to be sent to any number of engines."""

    @property
    def info(self) -> WeightsInfo:
        """What is sent."""
        ...

    @property
    def rounding_share(self) -> float | None:
        """Share of the changed entries that rounding left as they were; None where nothing is folded."""
        ...

    def send(self, engine: Engine) -> None:
        """Bring the weights to an engine, without serving them yet."""
        ...


@dataclass(frozen=True, slots=True)
class AdapterShipment:
    """Only the LoRA tensors."""

    info: WeightsInfo
    content: Any
    rounding_share: float | None = None

    def send(self, engine: Engine) -> None:
        """See `Shipment.send`."""
        engine.stage(self.content)


@dataclass(frozen=True, slots=True)
class MergedShipment:
    """The whole model in buckets."""

    info: WeightsInfo
    buckets: tuple[Any, ...]
    rounding_share: float | None

    def send(self, engine: Engine) -> None:
        """See `Shipment.send`."""
        for bucket in self.buckets:
            engine.load_weights(bucket, version=self.info.version)


def export_adapter(trainer: Trainer) -> AdapterShipment:
    """Export the trainer's adapter."""
    payload = trainer.export_adapter()
    return AdapterShipment(payload.info, payload.content)


def export_merged(trainer: Trainer, *, buffer_bytes: int) -> MergedShipment:
    """Export the trainer's whole model, folded, in buckets of at most buffer_bytes."""
    buckets = [trainer.export_weights(names) for names in trainer.bucket_names(buffer_bytes)]
    digests = {name: digest for bucket in buckets for name, digest in bucket.digests.items()}
    folded = sum(bucket.num_folded for bucket in buckets)
    unmoved = sum(bucket.num_unmoved for bucket in buckets)
    info = WeightsInfo(
        version=trainer.policy_version(),
        digest=combine_digests(digests),
        modules=tuple(sorted(digests)),
        num_bytes=sum(bucket.num_bytes for bucket in buckets),
    )
    return MergedShipment(info, tuple(bucket.content for bucket in buckets), unmoved / folded if folded else None)
