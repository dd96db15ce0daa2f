"""Fixtures that several test files share."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # models are tiny, and `make test` runs tests side by side


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take long: of two processes, neither is left alone with one of them at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


# --- A random model of a few thousand parameters with a character tokenizer. ---


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a two-layer Qwen3 with non-square projections and random weights, norms included."""
    from tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny"), seed=0)


# --- A real Ray, for one test file at a time. ---


@pytest.fixture(scope="module")
def ray_local() -> Iterator[None]:
    """A Ray of this process's own, whose processes can import what lies beside this file."""
    from relax_pipeline.config import ClusterConfig
    from relax_pipeline.remote.cluster import ray_cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        with ray_cluster(ClusterConfig(num_cpus=2, num_gpus=0), namespace="tests"):
            yield


# --- A real S3 API over HTTP: moto's server in a thread of the test process. ---


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """URL of an empty S3 store; credentials for it are in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "tester")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_CONFIG_FILE", "/dev/null")
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("S3_UPLOAD_PART_MIN_SIZE", "1")  # read when moto is imported: lets parts be small
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
        server.stop()


@pytest.fixture
def bucket(s3_endpoint: str) -> str:
    """Name of a new, empty bucket."""
    import boto3

    name = f"test-{uuid.uuid4().hex}"
    boto3.client("s3", endpoint_url=s3_endpoint, region_name="us-east-1").create_bucket(Bucket=name)
    return name
