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


class HfEngineConfig(EngineSection):
    """transformers, in a Ray actor. The embedded default and the reference the other engines are tested against."""

    kind: Literal["hf"] = "hf"


class SglangEngineConfig(EngineSection):
    """An SGLang server per engine."""

    kind: Literal["sglang"] = "sglang"
    batch_size: Annotated[int, Field(ge=1)] = 1024
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    data_parallel_size: Annotated[int, Field(ge=1)] = 1
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.8

    @property
    def num_gpus(self) -> int:
        """GPUs of one engine, where there are any."""
        return self.tensor_parallel_size * self.data_parallel_size


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
