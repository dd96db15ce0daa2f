"""Which trainer, and how it is laid out over processes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from relax_pipeline.config.base import Section


class TrainerSection(Section):
    """What every trainer backend has."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU where Ray has one for each rank, else the CPU."""
    micro_batch_tokens: Annotated[int, Field(ge=1)] = 8192
    """Token budget of one forward pass, padding included; one longer sequence is a micro-batch of its own."""
    step_timeout_seconds: Annotated[float, Field(gt=0)] = 1800
    """Deadline of one call to the trainer; a rank that misses it is killed and the attempt fails."""


class FsdpTrainerConfig(TrainerSection):
    """transformers + PEFT; FSDP2 when num_processes > 1. The embedded default: runs on a CPU."""

    kind: Literal["fsdp"] = "fsdp"
    num_processes: Annotated[int, Field(ge=1)] = 1
    """Data-parallel ranks, one Ray actor each."""
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
