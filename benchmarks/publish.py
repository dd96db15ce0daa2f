"""What publishing costs over moving the same bytes with bare boto3, to and from the same S3 server.

    python benchmarks/publish.py [--shards 4] [--shard-mib 64] [--repeats 3] [--output benchmarks/results/publish.json]

The server is moto in a process of its own; it keeps objects in memory. Each way of moving runs in a process of its
own, in turn, into a fresh prefix. Two bare transfers are timed: up only, and up and back down with a SHA-256 of what
came back, which is what publishing does. `peak_mib` is what the process's memory grew by.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from importlib.metadata import version
from pathlib import Path
from typing import Any

import boto3
import numpy as np
from boto3.s3.transfer import TransferConfig
from safetensors.numpy import save_file

from relax_pipeline.publish.upload import publish_model

BUCKET = "bench"
THREADS, PART = 8, 16 * 2**20
WAYS = ("bare_up", "bare_up_and_back", "publish")


def write_model(folder: Path, *, shards: int, shard_mib: int) -> int:
    """Write shards of random bytes and what makes them a model; return the bytes."""
    random = np.random.default_rng(0)
    for number in range(shards):
        data = random.integers(0, 256, (shard_mib, 2**20), dtype=np.uint8)
        save_file({f"layer.{number}": data}, folder / f"model-{number:05d}.safetensors")
    (folder / "config.json").write_text("{}")
    return sum(file.stat().st_size for file in folder.iterdir())


def move(way: str, folder: Path, endpoint: str) -> None:
    """Bring the folder to the server in one of three ways."""
    prefix = uuid.uuid4().hex
    if way == "publish":
        publish_model(folder, f"s3://{BUCKET}/{prefix}", run_name="bench", step=1, endpoint_url=endpoint)
        return
    client = boto3.client("s3", endpoint_url=endpoint)
    config = TransferConfig(multipart_threshold=PART, multipart_chunksize=PART, max_concurrency=THREADS)
    for file in sorted(folder.iterdir()):
        client.upload_file(str(file), BUCKET, f"{prefix}/{file.name}", Config=config)
    for file in sorted(folder.iterdir()) if way == "bare_up_and_back" else []:
        copy = folder.parent / "copy"
        client.download_file(BUCKET, f"{prefix}/{file.name}", str(copy), Config=config)
        with copy.open("rb") as back:
            hashlib.file_digest(back, "sha256")
        copy.unlink()


def measure(way: str, folder: Path, endpoint: str) -> dict[str, float]:
    """Time one way; runs in a fresh process."""
    before = peak_mib()
    started = time.perf_counter()
    move(way, folder, endpoint)
    return {"seconds": time.perf_counter() - started, "peak_mib": peak_mib() - before}


def peak_mib() -> float:
    """The process's highest resident memory so far."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def in_process(way: str, folder: Path, endpoint: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", way, "--folder", str(folder), "--endpoint", endpoint]
    result: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return result


def start_server() -> tuple[subprocess.Popen[str], str]:
    """Start moto and return its process and address."""
    code = (
        "from moto.server import ThreadedMotoServer as S; import time\n"
        "s = S(ip_address='127.0.0.1', port=0, verbose=False); s.start()\n"
        "print('http://%s:%d' % s.get_host_and_port(), flush=True); time.sleep(3600)"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert server.stdout is not None
    return server, server.stdout.readline().strip()


def benchmark(*, shards: int, shard_mib: int, repeats: int) -> dict[str, Any]:
    server, endpoint = start_server()
    try:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary, "model")
            folder.mkdir()
            num_bytes = write_model(folder, shards=shards, shard_mib=shard_mib)
            boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=BUCKET)
            runs = [{way: in_process(way, folder, endpoint) for way in WAYS} for _ in range(repeats)]
    finally:
        server.kill()
        server.wait()
    seconds = {way: statistics.median(run[way]["seconds"] for run in runs) for way in WAYS}
    return {
        "command": f"python benchmarks/publish.py --shards {shards} --shard-mib {shard_mib} --repeats {repeats}",
        "num_bytes": num_bytes,
        "median_seconds": seconds,
        "peak_mib": {way: max(run[way]["peak_mib"] for run in runs) for way in WAYS},
        "publish_over_bare_up": seconds["publish"] / seconds["bare_up"],
        "publish_over_bare_up_and_back": seconds["publish"] / seconds["bare_up_and_back"],
        "runs": runs,
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "boto3": version("boto3")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--shard-mib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "publish.json")
    parser.add_argument("--measure", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    # moto takes any credentials; the region keeps boto3 from looking for one.
    os.environ.update(AWS_ACCESS_KEY_ID="bench", AWS_SECRET_ACCESS_KEY="bench", AWS_DEFAULT_REGION="us-east-1")
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.folder, arguments.endpoint)))
        return
    result = benchmark(shards=arguments.shards, shard_mib=arguments.shard_mib, repeats=arguments.repeats)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "runs"}, indent=2))


if __name__ == "__main__":
    main()
