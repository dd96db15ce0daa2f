"""A Ray to run on: the run's own, or one that is there."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from relax_pipeline.config import ClusterConfig
from relax_pipeline.errors import ConfigError


@contextmanager
def ray_cluster(config: ClusterConfig, *, namespace: str) -> Iterator[None]:
    """Connect to Ray, starting it where the address is `local`, and let go of it at the end.

    Raises:
        ConfigError: The address answers nothing.
    """
    if ray.is_initialized():  # a caller's own connection, which is the caller's to end
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Otherwise Ray takes GPUs away from actors that ask for none, and they could not say why.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray makes workers nice for the sake of its own processes; here the workers are what the machine is for.
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        with _keep_signal_handlers():
            ray.init(
                address=config.ray_address,
                namespace=namespace,
                log_to_driver=False,
                logging_level=logging.WARNING,
                **_local_resources(config),
            )
    except ConnectionError as error:
        raise ConfigError(
            f"cluster.ray_address {config.ray_address!r}: {error}; use local, or start the cluster first"
        ) from error
    try:
        yield
    finally:
        with _keep_signal_handlers():
            ray.shutdown()


def num_cpus() -> int:
    """Return the CPUs of the connected cluster."""
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def num_gpus() -> int:
    """Return the GPUs of the connected cluster."""
    return int(ray.cluster_resources().get("GPU", 0))


def _local_resources(config: ClusterConfig) -> dict[str, object]:
    if config.ray_address != "local":
        return {}
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # this Ray listens on the loopback interface only
    resources: dict[str, object] = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    if config.num_cpus is not None:
        resources["num_cpus"] = config.num_cpus
    if config.num_gpus is not None:
        resources["num_gpus"] = config.num_gpus
    return resources


@contextmanager
def _keep_signal_handlers() -> Iterator[None]:
    """Undo what Ray does to SIGTERM: a cancelled flow relies on the handler that was there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
