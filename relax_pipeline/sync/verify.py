"""What an engine must show before it may serve a version."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from relax_pipeline.errors import SyncError
from relax_pipeline.types import Ack, WeightsInfo


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


def probe_difference(
    engine_logprobs: Sequence[NDArray[np.float32]], trainer_logprobs: Sequence[NDArray[np.float32]]
) -> float:
    """Return the largest |difference| in nats; NaN anywhere gives infinity."""
    differences = [np.abs(a - b).max() for a, b in zip(engine_logprobs, trainer_logprobs, strict=True)]
    worst = float(max(differences))
    return worst if np.isfinite(worst) else float("inf")
