"""What an engine must show before it may serve a version."""

from __future__ import annotations

from relax_pipeline.errors import SyncError
from relax_pipeline.rollout.base import EngineInfo
from relax_pipeline.types import Ack, WeightsInfo


def check_base(engine: EngineInfo, trainer_digest: str) -> None:
    """Compare the base an engine loaded with the one that is trained on.

    Raises:
        SyncError: They differ.
    """
    if engine.base_tensors_digest != trainer_digest:
        raise SyncError(
            f"engine {engine.engine_id} loaded a base with digest {engine.base_tensors_digest[:12]}, "
            f"the trainer {trainer_digest[:12]}; both must read the same model.path with the same dtype"
        )


def check_ack(ack: Ack, sent: WeightsInfo) -> None:
    """Compare what an engine says it holds with what was sent.

    Raises:
        SyncError: Another version, other modules, or other bytes; names the first that differ.
    """
    who = f"engine {ack.engine_id}"
    if ack.version != sent.version:
        raise SyncError(f"{who} activated version {ack.version}, version {sent.version} was sent")
    if ack.modules != sent.modules:
        missing, extra = sorted(set(sent.modules) - set(ack.modules)), sorted(set(ack.modules) - set(sent.modules))
        raise SyncError(f"{who}, version {sent.version}: modules missing {missing[:4]}, not sent {extra[:4]}")
    if ack.digest != sent.digest:
        raise SyncError(
            f"{who}, version {sent.version}: holds digest {ack.digest[:12]}, {sent.digest[:12]} was sent; "
            "the tensors were changed on the way"
        )
