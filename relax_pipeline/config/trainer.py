"""Which trainer, and how it is laid out over processes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

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
    """Megatron-Core + Megatron-Bridge. One process, and one GPU, a rank."""

    kind: Literal["megatron"] = "megatron"
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Ranks that share each layer's weights."""
    sequence_parallel: bool = False
    """Split the activations between those layers too; needs tensor_parallel_size above 1, and MoE models need it."""
    pipeline_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Ranks that share the layers."""
    virtual_pipeline_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Pieces of the model each pipeline rank holds: more pieces, less waiting; needs pipeline_parallel_size above 1."""
    data_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Copies of the model, each with its share of the samples."""
    context_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Ranks that share each sequence, where one is too long for a GPU; micro_batch_tokens are of all of them."""
    expert_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Ranks that share a layer's experts, taken from the tensor-, context- and data-parallel ones."""
    expert_tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Ranks that share one expert's weights."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass: selective: of attention, full: of whole layers."""
    transformer_engine: Literal["auto", "off"] = "off"
    """off: torch's own kernels, on an H200 1.5 times as fast for a dense model of 0.6 B (benchmarks/results/h200).
    auto: Transformer Engine's layers where it is installed."""

    @model_validator(mode="after")
    def sequence_parallel_needs_tensor_parallel(self) -> MegatronTrainerConfig:
        """Without tensor parallelism there is nobody to share a sequence with."""
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            raise ValueError(
                "sequence_parallel needs tensor_parallel_size above 1; raise that, or set sequence_parallel to false"
            )
        return self

    @model_validator(mode="after")
    def pieces_need_a_pipeline(self) -> MegatronTrainerConfig:
        """One pipeline rank would hold all pieces."""
        if self.virtual_pipeline_parallel_size > 1 and self.pipeline_parallel_size == 1:
            raise ValueError(
                f"virtual_pipeline_parallel_size {self.virtual_pipeline_parallel_size} needs pipeline_parallel_size "
                "above 1; raise that, or set virtual_pipeline_parallel_size to 1"
            )
        return self

    @model_validator(mode="after")
    def shared_sequences_need_our_own_attention(self) -> MegatronTrainerConfig:
        """Transformer Engine's layers pass keys and values round in a way of their own, never tried here."""
        if self.context_parallel_size > 1 and self.transformer_engine == "auto":
            raise ValueError(
                f"context_parallel_size {self.context_parallel_size} works with torch's own kernels only: set "
                "transformer_engine to off, or context_parallel_size to 1"
            )
        return self

    @model_validator(mode="after")
    def experts_fit_the_ranks(self) -> MegatronTrainerConfig:
        """Experts are spread over the ranks of one pipeline stage."""
        ranks = self.world_size // self.pipeline_parallel_size
        needed = self.expert_parallel_size * self.expert_tensor_parallel_size
        if ranks % needed:
            raise ValueError(
                f"expert_parallel_size x expert_tensor_parallel_size is {needed} and does not divide the {ranks} ranks "
                "of a pipeline stage (tensor_parallel_size x context_parallel_size x data_parallel_size): change one"
            )
        return self

    @property
    def world_size(self) -> int:
        """Processes, one GPU each; experts are spread over those of one pipeline stage."""
        model = self.tensor_parallel_size * self.context_parallel_size * self.pipeline_parallel_size
        return model * self.data_parallel_size


TrainerConfig = Annotated[FsdpTrainerConfig | MegatronTrainerConfig, Field(discriminator="kind")]
