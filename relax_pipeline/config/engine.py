"""Which rollout engines, and how many."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from relax_pipeline.config.base import Section


class EngineSection(Section):
    """What every engine backend has."""

    replicas: Annotated[int, Field(ge=1)] = 1
    """Engines; groups are dealt round them."""
    restarts: Annotated[int, Field(ge=0)] = 2
    """How often a run replaces a dead engine before it stops."""
    batch_size: Annotated[int, Field(ge=1)] = 128
    """Completions sent to an engine together."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU where Ray has one for the engine, else the CPU."""

    @property
    def num_gpus(self) -> int:
        """GPUs of one engine, where there are any."""
        return 1

    @property
    def streams(self) -> int:
        """Batches an engine is given side by side."""
        return 1

    @property
    def sleeps(self) -> bool:
        """Whether the engine frees memory while the trainer trains."""
        return False


class HfEngineConfig(EngineSection):
    """transformers, in a Ray actor. The embedded default and the reference the other engines are tested against."""

    kind: Literal["hf"] = "hf"


class SglangEngineConfig(EngineSection):
    """An SGLang server per engine, a child process of the engine's Ray actor."""

    kind: Literal["sglang"] = "sglang"
    batch_size: Annotated[int, Field(ge=1)] = 8
    """Completions in one request: neighbours share a prompt and its cache. The server decodes all requests together."""
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    data_parallel_size: Annotated[int, Field(ge=1)] = 1
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """Share of a GPU's memory for weights and key-value cache."""
    max_cached_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens the key-value cache holds; None: what memory_fraction leaves, 16384 on a CPU."""
    max_running_requests: Annotated[int, Field(ge=1)] = 256
    """Completions decoded together."""
    cuda_graph_max_batch: Annotated[int, Field(ge=0)] = 256
    """Largest decode batch that is captured as a CUDA graph; more take longer to start. 0: none."""
    attention_backend: str | None = None
    """SGLang's name; None: its own choice, torch_native on a CPU."""
    deterministic: bool = False
    """Honour each request's seed, with kernels whose results do not depend on the batch: slower. Else a completion
    lost with its engine is drawn anew, and two runs of one configuration differ."""
    offload: Literal["none", "kv_cache", "all"] = "none"
    """What the engine frees of its GPU's memory while the trainer trains; all: the weights too, which wait in the
    host's memory. Needs rollout.staleness 0 and, on a GPU, the package torch_memory_saver."""
    extra_args: tuple[str, ...] = ()
    """Further arguments of sglang.launch_server, as on its command line; they come last and win."""

    @property
    def num_gpus(self) -> int:
        """GPUs of one engine, where there are any."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def streams(self) -> int:
        """Batches an engine is given side by side: enough to keep it full."""
        return max(1, self.max_running_requests // self.batch_size)

    @property
    def sleeps(self) -> bool:
        """Whether the engine frees memory while the trainer trains."""
        return self.offload != "none"


class VllmEngineConfig(EngineSection):
    """A vLLM server per engine, in its own Python environment."""

    kind: Literal["vllm"] = "vllm"
    batch_size: Annotated[int, Field(ge=1)] = 1024
    python: str = "python"
    """Interpreter of the environment that holds vLLM."""
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    data_parallel_size: Annotated[int, Field(ge=1)] = 1
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.8

    @property
    def num_gpus(self) -> int:
        """GPUs of one engine, where there are any."""
        return self.tensor_parallel_size * self.data_parallel_size


EngineConfig = Annotated[HfEngineConfig | SglangEngineConfig | VllmEngineConfig, Field(discriminator="kind")]
