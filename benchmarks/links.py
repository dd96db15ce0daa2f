"""What a machine's links give, what a fingerprint costs on it, and whether blocks on GPUs arrive: seconds, no server.

    python benchmarks/links.py            # one GPU: CUDA handles; with two GPUs NCCL, too

Fails where a GPU's fingerprint differs from the CPU's, a block arrives changed, or released memory is not free.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

import torch

from relax_pipeline.lora.fingerprint import fingerprint, fingerprints
from relax_pipeline.rollout.device import DeviceTensors
from relax_pipeline.sync.ipc import Ipc
from relax_pipeline.sync.nccl import Nccl
from relax_pipeline.sync.transport import Transport

MIB = 1 << 20
_READER = """
import base64, pickle, sys, time
from relax_pipeline.lora.fingerprint import fingerprint
for line in sys.stdin:
    tensors = pickle.loads(base64.b64decode(line))
    begun = time.perf_counter()
    print(fingerprint(tensors), time.perf_counter() - begun, flush=True)
    del tensors
"""
"""A process that stands for an engine's: reads blocks, says what they are, and how long it took."""


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("links.py needs a GPU")
    print(json.dumps(measure_links(1 << 30)), flush=True)
    tensors = adapter_like("cuda")
    check_fingerprints(tensors)
    check_arrival(Ipc(same_gpu=True), tensors, gpu=0)
    check_release(tensors)
    if torch.cuda.device_count() > 1:
        check_arrival(Nccl(backend="nccl", buffer_bytes=512 * MIB, timeout=60), tensors, gpu=1)
    print("all right")


def measure_links(num_bytes: int) -> dict[str, float]:
    """Return bytes a second of copies of that many bytes, once warm, and of fingerprints."""
    block = torch.randn(num_bytes // 2, device="cuda", dtype=torch.bfloat16)
    there = torch.empty_like(block)
    pinned = torch.empty(block.shape, dtype=block.dtype, pin_memory=True)
    rates = {
        "gpu_to_pinned_host": _rate(num_bytes, lambda: pinned.copy_(block)),
        "pinned_host_to_gpu": _rate(num_bytes, lambda: block.copy_(pinned)),
        "within_gpu": _rate(num_bytes, lambda: there.copy_(block)),
        "fingerprint_on_gpu": _rate(num_bytes, lambda: fingerprints({"block": block})),
    }
    if torch.cuda.device_count() > 1:
        other = torch.empty_like(block, device="cuda:1")
        rates["gpu_to_gpu"] = _rate(num_bytes, lambda: other.copy_(block))
    return rates


def adapter_like(device: str) -> dict[str, torch.Tensor]:
    """Return tensors as many and as large as those of a rank-32 adapter of Qwen3-4B: 126 MiB."""
    shapes = {"q": (4096, 2560), "k": (1024, 2560), "v": (1024, 2560), "o": (2560, 4096)}
    shapes |= {"gate": (9728, 2560), "up": (9728, 2560), "down": (2560, 9728)}
    torch.manual_seed(0)
    return {
        f"layers.{layer}.{leaf}.lora_{half}": torch.randn(shape, device=device, dtype=torch.bfloat16)
        for layer in range(36)
        for leaf, (out, inside) in shapes.items()
        for half, shape in (("A", (32, inside)), ("B", (out, 32)))
    }


def check_fingerprints(tensors: Mapping[str, torch.Tensor]) -> None:
    on_cpu = {name: tensor.cpu() for name, tensor in tensors.items()}
    assert fingerprint(tensors) == fingerprint(on_cpu), "the GPU's fingerprint is not the CPU's"
    seconds = min(_seconds(lambda: fingerprints(tensors)) for _ in range(3))
    print(json.dumps({"fingerprint_of_adapter_seconds": seconds}), flush=True)


def check_arrival(transport: Transport, tensors: Mapping[str, torch.Tensor], *, gpu: int) -> None:
    """Send three versions to a process on a GPU."""
    environment = dict(os.environ) | {"CUDA_VISIBLE_DEVICES": _visible(gpu)}
    command = [sys.executable, "-c", _READER]
    expected, name = fingerprint(tensors), type(transport).__name__
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        for version in range(3):
            begun = time.perf_counter()
            packed = pickle.dumps(transport.weights(tensors, version=version))
            packing = time.perf_counter() - begun
            reader.stdin.write(base64.b64encode(packed).decode() + "\n")
            reader.stdin.flush()
            digest, reading = reader.stdout.readline().split()
            assert digest == expected, f"{name}: version {version} arrived changed"
            transport.forget(version)
            print(json.dumps({"transport": name, "pack_seconds": packing, "open_and_fingerprint_seconds": reading}))
        reader.stdin.close()
    transport.close()


def check_release(tensors: Mapping[str, torch.Tensor]) -> None:
    """Blocks that nobody opened are free once they are released."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        block = DeviceTensors.write(tensors)
        pickle.dumps(block)
        block.release()
        assert torch.cuda.memory_allocated() == before, "a released block is still allocated"


def _visible(gpu: int) -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")[gpu]


def _rate(num_bytes: int, work: Callable[[], object]) -> float:
    work()
    return num_bytes / min(_seconds(work) for _ in range(3))


def _seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
