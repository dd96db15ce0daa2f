"""How much of its GPU a trainer rank takes at its peak, worked out from the model's shape and the layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from relax_pipeline.config import MegatronTrainerConfig, RunConfig
from relax_pipeline.trainer.megatron_limits import EXPERT_COUNTS

_MOMENTS_BYTES = 8
_FLOAT32_BYTES = 4
_LOGITS_IN_FULL_PRECISION = 3 * (1 << 26) * _FLOAT32_BYTES
"""What `rl.logprobs` holds at one time on a GPU."""


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Bytes on one GPU when the backward pass begins. CUDA's own 0.5 GiB come on top."""

    tokens: int
    """Of a micro-batch on this rank."""
    weights: int
    trained: int
    """Copies in the model's precision, gradients, float32 masters and two moments."""
    activations: int
    logits: int
    """And their gradient."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.trained + self.activations + self.logits


def trainer_memory(config: RunConfig, shape: Any, *, base_parameters: int, trained: int) -> TrainerMemory | None:
    """Return the memory of a rank of a Megatron trainer; None for other trainers, experts and delta nets.

    Within 3% of what was measured on H200s for a model of 0.6 B on one GPU, two tensor-parallel and two
    context-parallel ones, before SwiGLU kept its input only.

    Args:
        config: Of the run.
        shape: transformers' configuration of the language model.
        base_parameters: Of the model.
        trained: Parameters that train.
    """
    trainer = config.trainer
    if not isinstance(trainer, MegatronTrainerConfig) or _is_irregular(shape):
        return None
    split, stages, ranks = trainer.tensor_parallel_size, trainer.pipeline_parallel_size, trainer.context_parallel_size
    itemsize = getattr(torch, config.model.dtype).itemsize
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    tokens = -(-max(trainer.micro_batch_tokens, longest) // ranks)
    embedding = shape.vocab_size * shape.hidden_size
    masters = _FLOAT32_BYTES if itemsize < _FLOAT32_BYTES else 0
    copy = itemsize if config.lora.enabled else 0  # without adapters the weights are what trains
    return TrainerMemory(
        tokens=tokens,
        weights=((base_parameters - embedding) // stages + embedding) // split * itemsize,
        trained=trained // (split * stages) * (copy + _FLOAT32_BYTES + masters + _MOMENTS_BYTES),
        activations=_activations(trainer, shape, tokens) * itemsize,
        logits=2 * tokens * shape.vocab_size // split * itemsize + _LOGITS_IN_FULL_PRECISION,
    )


def cache_bytes_per_token(config: RunConfig, shape: Any) -> int | None:
    """Return the bytes of one token's keys and values on a GPU of an engine; None where layers differ."""
    if _is_irregular(shape):
        return None
    width = 2 * shape.num_hidden_layers * shape.num_key_value_heads * _head_size(shape)
    itemsize: int = getattr(torch, config.model.dtype).itemsize
    return int(width * itemsize) // int(getattr(config.engine, "tensor_parallel_size", 1))


def _activations(trainer: MegatronTrainerConfig, shape: Any, tokens: int) -> int:
    """Return the elements that are kept for the backward pass. A pipeline's first stage holds as many batches as it
    has stages, so all of it is as much as one stage of all layers."""
    hidden, split, ranks = shape.hidden_size, trainer.tensor_parallel_size, trainer.context_parallel_size
    heads, keys = shape.num_attention_heads * _head_size(shape), shape.num_key_value_heads * _head_size(shape)
    # Inputs and outputs of two norms; queries before and after norm and rotation, keys, values, the attention's
    # output; SwiGLU's input and output.
    alike = 4 * hidden // (split if trainer.sequence_parallel else 1)
    layer = tokens * (alike + (4 * heads + 3 * keys + 3 * shape.intermediate_size) // split)
    if ranks > 1:  # each chunk keeps the keys and values up to its own end
        layer += tokens * (2 * ranks + 1) // 2 * 2 * keys // split
    if trainer.recompute == "full":
        return int(shape.num_hidden_layers * tokens * hidden + layer)
    return int(shape.num_hidden_layers * layer)


def _head_size(shape: Any) -> int:
    return int(getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads)


def _is_irregular(shape: Any) -> bool:
    experts = any(getattr(shape, name, None) for name in EXPERT_COUNTS)
    return experts or "linear_attention" in (getattr(shape, "layer_types", None) or ())
