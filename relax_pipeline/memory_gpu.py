"""What an engine holds of its GPU, and whether all that a run puts on one GPU goes together."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

import torch

from relax_pipeline.config import RunConfig, SglangEngineConfig
from relax_pipeline.errors import ConfigError
from relax_pipeline.memory import TrainerMemory
from relax_pipeline.memory_layers import head_size, is_known, linear_layers
from relax_pipeline.metrics.text import bytes_text
from relax_pipeline.sync.blocks import SHARE_OF_GPU
from relax_pipeline.sync.transport import on_one_gpu, transport_kind


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes on one GPU of an SGLang engine. CUDA graphs and what a pass works with come on top."""

    weights: int
    adapters: int
    """Room for all versions that are hosted at once, in adapter mode."""
    cache_of_token: int
    completions: int
    """That run at once, at most."""
    cache: int
    """For so many of full length."""


def engine_memory(config: RunConfig, shape: Any, *, model_bytes: int, adapter_bytes: int) -> EngineMemory | None:
    """Return the memory of an engine's GPU; None for other engines than SGLang, and for layers not known.

    Args:
        config: Of the run.
        shape: transformers' configuration of the language model.
        model_bytes: Of all weights.
        adapter_bytes: Of one version.
    """
    engine, rollout = config.engine, config.rollout
    if not isinstance(engine, SglangEngineConfig) or not is_known(shape):
        return None
    split = engine.tensor_parallel_size
    # SGLang makes room for the versions kept, one that arrives, and the bare base.
    slots = rollout.versions_in_use + 2 if config.sync.mode == "adapter" else 0
    share = -(-rollout.completions_per_step // engine.replicas)
    completions = min(engine.max_running_requests, share)
    of_token = cache_bytes_per_token(config, shape)
    return EngineMemory(
        weights=model_bytes // split,
        adapters=slots * adapter_bytes // split,
        cache_of_token=of_token,
        completions=completions,
        cache=of_token * completions * config.longest_sequence,
    )


def cache_bytes_per_token(config: RunConfig, shape: Any) -> int:
    """Return the bytes of one token's keys and values on a GPU of an engine; gated delta nets keep none a token."""
    width = 2 * linear_layers(shape).count(False) * shape.num_key_value_heads * head_size(shape)
    itemsize: int = getattr(torch, config.model.dtype).itemsize
    return int(width * itemsize) // int(getattr(config.engine, "tensor_parallel_size", 1))


def sent_bytes(config: RunConfig, *, model_bytes: int, adapter_bytes: int, gpu_bytes: int | None) -> int:
    """Return what versions take that stay on the GPU of the trainer's first rank, to be sent again to an engine that
    needs them.

    Args:
        config: Of the run.
        model_bytes: Of all weights.
        adapter_bytes: Of one version of the adapter.
        gpu_bytes: Of the GPU; None: large enough for all of them.
    """
    transport = transport_kind(config, on_gpus=True)
    if transport != "nccl" and not (transport == "ipc" and on_one_gpu(config)):
        return 0
    # As `sync.outbox` keeps them.
    versions = (config.rollout.versions_in_use + 1) * adapter_bytes if config.sync.mode == "adapter" else model_bytes
    return versions if gpu_bytes is None else min(versions, gpu_bytes // SHARE_OF_GPU)


def stays_awake(config: RunConfig, engine: EngineMemory | None, gpu_bytes: int) -> int:
    """Return what an engine keeps of the trainer's GPU while that trains; nothing unless they share it."""
    if engine is None or not config.cluster.colocate:
        return 0
    assert isinstance(config.engine, SglangEngineConfig)
    match config.engine.offload:
        case "none":
            return int(config.engine.memory_fraction * gpu_bytes)
        case "kv_cache":
            return engine.weights + engine.adapters
        case "all":
            return 0


def check_room(
    config: RunConfig, trainer: TrainerMemory | None, engine: EngineMemory | None, *, sent: int, gpu_bytes: int
) -> str | None:
    """Return a warning where a GPU is likely too small; None where all goes together.

    Raises:
        ConfigError: Even what is there all the time does not fit, whatever the micro-batch.
    """
    share = 0
    if engine and isinstance(config.engine, SglangEngineConfig):
        share = int(config.engine.memory_fraction * gpu_bytes)
        if engine.weights + engine.adapters > share:
            raise ConfigError(
                f"engine.memory_fraction {config.engine.memory_fraction} is {bytes_text(share)} of a GPU, and an "
                f"engine's weights and adapters take {bytes_text(engine.weights + engine.adapters)}: raise it, or "
                "engine.tensor_parallel_size"
            )
    if trainer is None:
        return None
    kept = trainer.fixed + sent
    needs = f"a trainer's GPU of {bytes_text(gpu_bytes)} would have to hold"
    if kept > gpu_bytes:
        raise ConfigError(
            f"{needs} {bytes_text(kept)} before the first token: spread the model over more ranks, or lower lora.rank"
        )
    if config.cluster.colocate and kept + share > gpu_bytes:
        raise ConfigError(
            f"{needs} {bytes_text(kept)} of the trainer beside the {bytes_text(share)} of an engine that generates: "
            f"lower engine.memory_fraction to {int(100 * (gpu_bytes - kept) / gpu_bytes) / 100}"
        )
    beside = stays_awake(config, engine, gpu_bytes)
    total = kept + beside + trainer.activations + trainer.logits
    if total > gpu_bytes:
        there = f", {bytes_text(beside)} of them the engine's, which engine.offload all would free" if beside else ""
        return (
            f"{needs} about {bytes_text(total)}{there}: lower trainer.micro_batch_tokens ({trainer.tokens:,} a rank), "
            "or recompute"
        )
    return None


def smallest_gpu() -> int | None:
    """Return the bytes of this machine's smallest GPU; None without one.

    The driver's tool is asked: torch would take half a GiB of the first GPU to answer.
    """
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, check=False, capture_output=True, text=True)
    mebibytes = [int(line) for line in answer.stdout.split() if line.isdigit()]  # none where the driver is not loaded
    return min(mebibytes) << 20 if mebibytes else None
