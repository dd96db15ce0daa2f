"""The command line and environment of an SGLang server, from the run's configuration."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from relax_pipeline.config import ModelConfig, SglangEngineConfig
from relax_pipeline.errors import EngineError
from relax_pipeline.models import resolve_device
from relax_pipeline.rollout.sglang.flavour import DELTA_NET_LEAVES, sglang_leaves

_CPU_STAND_IN = Path(__file__).parent / "cpu"


@dataclass(frozen=True, slots=True)
class LoraRoom:
    """What the server sets aside for adapters; a server without it cannot host any."""

    rank: int
    leaf_modules: tuple[str, ...]
    """In HF names, as adapters arrive."""
    versions: int
    """Adapters held side by side."""


def server_command(config: SglangEngineConfig, model: ModelConfig, *, lora: LoraRoom | None, port: int) -> list[str]:
    """Return the server's command line. Token ids in, token ids out: it loads no tokenizer.

    Raises:
        EngineError: There are fewer GPUs than engine.tensor_parallel_size.
        ModelError: engine.device is cuda and there is none.
    """
    options, switches = _cpu_arguments(config) if on_cpu(config) else _cuda_arguments(config)
    options |= {
        "--model-path": model.path,
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": model.dtype,
        "--tp-size": config.tensor_parallel_size,
        "--dp-size": config.data_parallel_size,
        "--max-running-requests": config.max_running_requests,
        "--grammar-backend": "none",
        "--log-level": "info",
    }
    switches += ["--skip-tokenizer-init", "--skip-server-warmup", "--sleep-on-idle"]
    if config.deterministic:
        switches.append("--enable-deterministic-inference")
    if model.trust_remote_code:
        switches.append("--trust-remote-code")
    return [
        sys.executable,
        "-m",
        _server_module(lora),
        *(str(part) for option in options.items() for part in option),
        *switches,
        *(_lora_arguments(lora, config) if lora else ()),
        *config.extra_args,
    ]


def server_environment(config: SglangEngineConfig) -> dict[str, str]:
    """Return the server's environment: ours, with what SGLang needs."""
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # without .pyc files each process compiles SGLang again
    # Offline, or a request for a dropped adapter asks the hub for it; and /health must not wait for a token.
    environment |= {"HF_HUB_OFFLINE": "1", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
    if on_cpu(config):
        environment |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "SGLANG_MAMBA_CONV_DTYPE": "float32",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(_CPU_STAND_IN), os.environ.get("PYTHONPATH")))),
        }
        if config.tensor_parallel_size > 1:
            cores = (str(rank % (os.cpu_count() or 1)) for rank in range(config.tensor_parallel_size))
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(cores)
    return environment


def on_cpu(config: SglangEngineConfig) -> bool:
    """Whether the server runs without a GPU."""
    return resolve_device(config.device).type == "cpu"


def _cpu_arguments(config: SglangEngineConfig) -> tuple[dict[str, object], list[str]]:
    """Return options with a value, and switches."""
    options: dict[str, object] = {
        "--device": "cpu",
        "--attention-backend": config.attention_backend or "torch_native",
        "--sampling-backend": "pytorch",
        "--mem-fraction-static": 0.2,
        "--max-total-tokens": config.max_cached_tokens or 16384,
    }
    return options, ["--disable-cuda-graph", "--disable-overlap-schedule"]


def _cuda_arguments(config: SglangEngineConfig) -> tuple[dict[str, object], list[str]]:
    """Return options with a value, and switches."""
    if config.tensor_parallel_size > torch.cuda.device_count():
        raise EngineError(
            f"engine.tensor_parallel_size is {config.tensor_parallel_size} and this process sees "
            f"{torch.cuda.device_count()} GPUs; lower it, or give each engine more"
        )
    options: dict[str, object] = {"--mem-fraction-static": config.memory_fraction}
    switches = []
    if config.attention_backend is not None:
        options["--attention-backend"] = config.attention_backend
    if config.max_cached_tokens is not None:
        options["--max-total-tokens"] = config.max_cached_tokens
    if config.cuda_graph_max_batch:
        options["--cuda-graph-max-bs-decode"] = config.cuda_graph_max_batch
    else:
        switches.append("--disable-cuda-graph")
    if config.offload != "none":
        switches += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
    return options, switches


def _server_module(lora: LoraRoom | None) -> str:
    """Return what is run: SGLang's own server, unless its command line would refuse the names of what it is to host."""
    leaves = sglang_leaves(lora.leaf_modules) if lora else ()
    return "relax_pipeline.rollout.sglang.serve" if DELTA_NET_LEAVES.intersection(leaves) else "sglang.launch_server"


def _lora_arguments(lora: LoraRoom, config: SglangEngineConfig) -> Sequence[str]:
    """Room for the versions kept, one that arrives, and the bare base, which counts as one in a batch."""
    room = str(lora.versions + 2)
    arguments = [
        "--enable-lora",
        *("--max-lora-rank", str(lora.rank)),
        *("--max-loaded-loras", room),
        *("--max-loras-per-batch", room),
    ]
    if on_cpu(config):
        arguments += ["--lora-backend", "torch_native"]
    return [*arguments, "--lora-target-modules", *sglang_leaves(lora.leaf_modules)]
