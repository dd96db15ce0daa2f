"""Where a run's files go: checkpoints, the published model, metrics."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from relax_pipeline.config.base import Section


class CheckpointConfig(Section):
    """Resumable saves."""

    every: Annotated[int, Field(ge=1)] = 10
    """Steps between saves; the last step is always saved."""
    keep_last: Annotated[int, Field(ge=1)] = 3
    keep_every: Annotated[int, Field(ge=1)] | None = None
    """Also keep each step that this divides."""
    save_lora_only: bool = True
    """Leave the frozen base out: resume reads it from model.path. Ignored, and off, while lora.rank is 0."""


class PublishConfig(Section):
    """What happens to the model after the last step."""

    enabled: bool = False
    destination: str | None = None
    """file:///folder or s3://bucket/prefix."""
    endpoint_url: str | None = None
    """Of an S3-compatible store; None: AWS. Credentials come from the environment."""

    @field_validator("destination")
    @classmethod
    def destination_is_a_uri(cls, destination: str | None) -> str | None:
        """Refuse schemes nothing can write to."""
        if destination is not None and not destination.startswith(("file://", "s3://")):
            raise ValueError(f"{destination!r}: write file:///folder or s3://bucket/prefix")
        return destination


class TrackingConfig(Section):
    """Metrics beyond the JSONL file, which is always written."""

    artifact_every: Annotated[int, Field(ge=1)] = 5
    """Steps between updates of the curves in the Prefect UI."""
    sample_completions: Annotated[int, Field(ge=0)] = 4
    """Completions of each step kept in the report."""
