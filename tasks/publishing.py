"""Merging and publishing as tasks: idempotent, so that they may be retried and triggered twice."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from relax_pipeline.checkpoint.store import CheckpointRef, in_use
from relax_pipeline.config import ClusterConfig
from relax_pipeline.publish.upload import publish_model
from relax_pipeline.storage.files import write_atomic
from tasks.events import announce

_RETRY_SECONDS = [2.0, 10.0, 30.0]
_MERGE_CPUS = 2
_MERGE_BYTES = 2 << 30
"""A merge holds pieces of tensors, never a shard: 0.7 GB were measured on shards of 2 GB."""


@task(task_run_name="merge-{step}", cache_policy=NO_CACHE, persist_result=False)
def merge(base: Path, checkpoint: Path, step: int, output: Path, *, ray_address: str | None) -> dict[str, Any]:
    """Fold the checkpoint's adapter into the base and verify the result; what is already merged is kept."""
    from relax_pipeline.merge.merge import merge_adapter  # noqa: PLC0415 - loads torch, and run_on_cluster Ray
    from relax_pipeline.remote.job import run_on_cluster  # noqa: PLC0415

    call = partial(merge_adapter, base, checkpoint, output)
    with in_use(CheckpointRef(step, checkpoint)):
        if ray_address is None:
            return asdict(call())
        cluster = ClusterConfig(ray_address=ray_address)
        return asdict(run_on_cluster(call, cluster=cluster, num_cpus=_MERGE_CPUS, memory_bytes=_MERGE_BYTES))


@task(
    task_run_name="publish-{step}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=len(_RETRY_SECONDS),
    retry_delay_seconds=_RETRY_SECONDS,
)
def publish(
    folder: Path, destination: str, *, run_name: str, step: int, endpoint_url: str | None, card: dict[str, str]
) -> dict[str, Any]:
    """Send a merged model to object storage; what is already there is kept."""
    report = publish_model(folder, destination, run_name=run_name, step=step, endpoint_url=endpoint_url, card=card)
    return asdict(report)


@task(task_run_name="record-{step}", cache_policy=NO_CACHE, persist_result=False)
def record(run_folder: Path, step: int, published: dict[str, Any]) -> None:
    """Note beside the checkpoints that this step is published."""
    write_atomic(run_folder / "PUBLISHED.json", json.dumps({"step": step, **published}, indent=2) + "\n")
    announce("published", run_folder.name, {"step": step, "uri": published["uri"], "digest": published["digest"]})
