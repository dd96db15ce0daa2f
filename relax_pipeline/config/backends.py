"""Which trainer, which engines, how weights pass between them, and where all of it runs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from relax_pipeline.config.base import Section


class TrainerSection(Section):
    """What every trainer backend has."""

    micro_batch_tokens: Annotated[int, Field(ge=1)] = 8192
    """Token budget of one forward pass, padding included; one longer sequence is a micro-batch of its own."""
    step_timeout_seconds: Annotated[float, Field(gt=0)] = 1800
    """Deadline of one call to the trainer; a rank that misses it is killed and the attempt fails."""


class FsdpTrainerConfig(TrainerSection):
    """transformers + PEFT; FSDP2 when num_processes > 1. The embedded default: runs on a CPU."""

    kind: Literal["fsdp"] = "fsdp"
    num_processes: Annotated[int, Field(ge=1)] = 1
    """Data-parallel ranks, one Ray actor each."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU where Ray has one for each rank, else the CPU."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more compute."""

    @property
    def world_size(self) -> int:
        """Processes, and GPUs where there are any."""
        return self.num_processes


class MegatronTrainerConfig(TrainerSection):
    """Megatron-Core + Megatron-Bridge."""

    kind: Literal["megatron"] = "megatron"
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    pipeline_parallel_size: Annotated[int, Field(ge=1)] = 1
    expert_parallel_size: Annotated[int, Field(ge=1)] = 1
    expert_tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    data_parallel_size: Annotated[int, Field(ge=1)] = 1
    sequence_parallel: bool = False

    @property
    def world_size(self) -> int:
        """Processes, one GPU each; experts are spread over those of the data-parallel ranks."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size


TrainerConfig = Annotated[FsdpTrainerConfig | MegatronTrainerConfig, Field(discriminator="kind")]


class EngineSection(Section):
    """What every engine backend has."""

    replicas: Annotated[int, Field(ge=1)] = 1
    """Engines; groups are dealt round them."""
    restarts: Annotated[int, Field(ge=0)] = 2
    """How often a run replaces a dead engine before it stops."""


class HfEngineConfig(EngineSection):
    """transformers, in a Ray actor. The embedded default and the reference the other engines are tested against."""

    kind: Literal["hf"] = "hf"
    batch_size: Annotated[int, Field(ge=1)] = 128
    """Completions decoded together."""
    device: Literal["auto", "cpu", "cuda"] = "auto"


class SglangEngineConfig(EngineSection):
    """An SGLang server per engine."""

    kind: Literal["sglang"] = "sglang"
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    data_parallel_size: Annotated[int, Field(ge=1)] = 1
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.8


class VllmEngineConfig(EngineSection):
    """A vLLM server per engine, in its own Python environment."""

    kind: Literal["vllm"] = "vllm"
    python: str = "python"
    """Interpreter of the environment that holds vLLM."""
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    data_parallel_size: Annotated[int, Field(ge=1)] = 1
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.8


EngineConfig = Annotated[HfEngineConfig | SglangEngineConfig | VllmEngineConfig, Field(discriminator="kind")]


class SyncConfig(Section):
    """How the trainer's weights reach the engines."""

    mode: Literal["adapter", "merge"] = "merge"
    """adapter: the base once, then only LoRA tensors. merge: the whole model with the adapter folded in, each step.
    Not given: merge, with a warning."""
    transport: Literal["object_store", "ipc", "nccl", "disk"] = "object_store"
    buffer_bytes: Annotated[int, Field(ge=1 << 20)] = 512 << 20
    """Cap of one bucket of tensors on the way."""
    verify: bool = True
    """Read digests and module sets back and compare probe logprobs after each sync. Off: the report says so."""
    probe_tolerance: Annotated[float, Field(gt=0)] | None = None
    """Largest |logprob| difference of the probe; None: 1e-3 for float32 and 0.25 for bfloat16."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 300


class ClusterConfig(Section):
    """Where the Ray actors live."""

    ray_address: str = "local"
    """local: a Ray of this run's own, gone with it. auto or ray://host:port: a cluster that runs already."""
    num_cpus: Annotated[int, Field(ge=1)] | None = None
    """CPUs of the local Ray; None: all."""
    colocate: bool = False
    """Trainer and engines share their GPUs."""
    num_gpus: Annotated[int, Field(ge=0)] | None = None
    """GPUs of the local Ray; None: all."""
