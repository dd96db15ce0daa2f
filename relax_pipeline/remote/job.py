"""One call on the cluster, with the CPUs and memory it needs, for work that is not part of a training session."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import ray
from ray.exceptions import RayTaskError

from relax_pipeline.config import ClusterConfig
from relax_pipeline.errors import ConfigError, RelaxError
from relax_pipeline.remote.cluster import ray_cluster

T = TypeVar("T")


def run_on_cluster(call: Callable[[], T], *, cluster: ClusterConfig, num_cpus: int, memory_bytes: int) -> T:
    """Run a call on some node of a Ray cluster and return its result.

    Args:
        call: Pickled to the node; files it names must be reachable there.
        cluster: Where.
        num_cpus: Reserved for it.
        memory_bytes: Reserved for it.

    Raises:
        ConfigError: No node is that large, so that Ray would wait for ever.
        RelaxError: What the call raised.
    """
    with ray_cluster(cluster, namespace="relax-jobs"):
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(node.get("CPU", 0) >= num_cpus and node.get("memory", 0) >= memory_bytes for node in nodes):
            raise ConfigError(
                f"no node of the Ray cluster {cluster.ray_address!r} has {num_cpus} CPUs and "
                f"{memory_bytes / 2**30:.1f} GiB of memory; add one, or run without a cluster"
            )
        task = ray.remote(_run).options(num_cpus=num_cpus, memory=memory_bytes, max_retries=0)
        try:
            result: T = ray.get(task.remote(call))
        except RayTaskError as error:
            if isinstance(error.cause, RelaxError):
                raise error.cause from None
            raise
        return result


def _run(call: Callable[[], T]) -> T:
    return call()
