"""How weights pass from the trainer to the engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from relax_pipeline.config.base import Section


class SyncConfig(Section):
    """How the trainer's weights reach the engines."""

    mode: Literal["adapter", "merge"] = "merge"
    """adapter: the base once, then only LoRA tensors. merge: the whole model with the adapter folded in, each step.
    Not given: merge, with a warning."""
    transport: Literal["auto", "object_store", "ipc", "nccl", "disk"] = "auto"
    """auto: ipc where all share one GPU, nccl between engines of one GPU each and a trainer on others, else
    object_store."""
    buffer_bytes: Annotated[int, Field(ge=1 << 20)] = 512 << 20
    """Cap of one bucket of tensors on the way."""
    verify: bool = True
    """Read digests and module sets back and compare probe logprobs after each sync. Off: the report says so."""
    verify_every: Annotated[int, Field(ge=1)] = 1
    """Compare probe logprobs at the first and every n-th sync; digests and module sets at each."""
    probe_tolerance: Annotated[float, Field(gt=0)] | None = None
    """Largest mean |logprob| difference of the probe, in nats; None: 1e-3 for float32 and 0.1 for bfloat16."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 300
    """For each thing an engine does but `generate`, its start included, and for the trainer's probe."""
