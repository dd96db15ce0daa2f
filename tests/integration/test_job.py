"""Single calls on a Ray cluster."""

from __future__ import annotations

import os
from functools import partial

import pytest

from relax_pipeline.config import ClusterConfig
from relax_pipeline.errors import ConfigError, MergeError
from relax_pipeline.remote.job import run_on_cluster

LOCAL = ClusterConfig(num_cpus=1)


def _refuse(reason: str) -> None:
    raise MergeError(reason)


def test_the_call_runs_elsewhere_and_its_result_comes_back() -> None:
    assert run_on_cluster(os.getpid, cluster=LOCAL, num_cpus=1, memory_bytes=1 << 20) != os.getpid()


def test_its_own_errors_arrive_as_themselves() -> None:
    with pytest.raises(MergeError, match=r"^does not fit$"):
        run_on_cluster(partial(_refuse, "does not fit"), cluster=LOCAL, num_cpus=1, memory_bytes=1 << 20)


def test_what_no_node_can_hold_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="no node of the Ray cluster 'local' has 64 CPUs"):
        run_on_cluster(os.getpid, cluster=LOCAL, num_cpus=64, memory_bytes=1 << 20)
