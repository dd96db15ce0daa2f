"""Where a run's files go: checkpoints, the published model, metrics."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from relax_pipeline.config.base import Section


def _check_uri(uri: str | None) -> str | None:
    """Refuse schemes nothing can write to."""
    if uri is not None and not uri.startswith(("file://", "s3://")):
        raise ValueError(f"{uri!r}: write file:///folder or s3://bucket/prefix")
    return uri


StoreUri = Annotated[str | None, AfterValidator(_check_uri)]


class CheckpointConfig(Section):
    """Resumable saves."""

    every: Annotated[int, Field(ge=1)] = 10
    """Steps between saves; the last step is always saved."""
    keep_last: Annotated[int, Field(ge=1)] = 3
    keep_every: Annotated[int, Field(ge=1)] | None = None
    """Also keep each step that this divides."""
    save_lora_only: bool = True
    """Leave the frozen base out: resume reads it from model.path. Ignored, and off, while lora.rank is 0."""
    background: bool = False
    """Write a save behind the step that follows, which waits only while what is saved is copied to host memory. It
    counts once that step is done; the last step's save is never put off."""
    save_on_cancel: bool = False
    """Also save when the run is cancelled between two optimizer steps; has to fit into the worker's 30 s."""
    store: StoreUri = None
    """Copy each save here in the background, and resume from here on a machine that has none: file:///folder or
    s3://bucket/prefix. One attempt at a time may write to a run's store."""
    endpoint_url: str | None = None
    """Of an S3-compatible store; None: AWS. Credentials come from the environment."""
    remote_keep_last: Annotated[int, Field(ge=1)] | None = None
    """Saves kept in the store; None: all."""
    remote_keep_every: Annotated[int, Field(ge=1)] | None = None
    """Also keep each step that this divides."""


class PublishConfig(Section):
    """What happens to the model after the last step."""

    enabled: bool = False
    destination: StoreUri = None
    """file:///folder or s3://bucket/prefix."""
    endpoint_url: str | None = None
    """Of an S3-compatible store; None: AWS. Credentials come from the environment."""


class TrackingConfig(Section):
    """Metrics beyond the JSONL file, which is always written."""

    artifact_every: Annotated[int, Field(ge=1)] = 5
    """Steps between updates of the curves in the Prefect UI."""
    sample_completions: Annotated[int, Field(ge=0)] = 4
    """Completions of each step kept in the report."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ()
    """Where the curves go as well. Addresses and keys come from each service's own environment variables."""
