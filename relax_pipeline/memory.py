"""How much of its GPU a trainer rank takes at its peak, worked out from the model's shape and the layout."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from relax_pipeline.config import FsdpTrainerConfig, MegatronTrainerConfig, RunConfig
from relax_pipeline.config.model import MEGATRON_TO_HF_MODULES
from relax_pipeline.memory_layers import (
    has_experts,
    is_known,
    kept_by_megatron,
    kept_by_transformers,
)

_MOMENTS_BYTES = 8
_FLOAT32_BYTES = 4
_FUSED = {leaf: name for name in ("linear_qkv", "linear_fc1", "in_proj") for leaf in MEGATRON_TO_HF_MODULES[name]}
"""Modules that are one in Megatron, and share one lora_A."""


class Parameters(NamedTuple):
    """How many parameters, apart where ranks share them apart."""

    rest: int
    experts: int = 0


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
    def fixed(self) -> int:
        """What is there before the first token."""
        return self.weights + self.trained

    @property
    def total(self) -> int:
        """All of it."""
        return self.fixed + self.activations + self.logits


def trainer_memory(config: RunConfig, shape: Any, *, base: Parameters, trained: Parameters) -> TrainerMemory | None:
    """Return the memory of a trainer's rank; None where it is not known.

    It is not of other layers than `memory_layers` counts, and under fsdp not of mixtures of experts nor of all weights
    in half precision. Gated delta nets are taken to run on flash-linear-attention where it is installed here.

    Args:
        config: Of the run.
        shape: transformers' configuration of the language model.
        base: Of the model.
        trained: Of what trains.
    """
    if not is_known(shape):
        return None
    if isinstance(config.trainer, MegatronTrainerConfig):
        return _megatron(config, config.trainer, shape, base, trained)
    itemsize = _itemsize(config)
    if has_experts(shape) or not (config.lora.enabled or itemsize == _FLOAT32_BYTES):
        return None
    return _fsdp(config, config.trainer, shape, base, trained)


def expert_share(shapes: Mapping[str, tuple[int, int]]) -> int:
    """Return how many of the modules' parameters are those of experts that ranks share."""
    return sum(inside * outside for name, (inside, outside) in shapes.items() if _in_experts(name))


def adapter_parameters(config: RunConfig, adapted: Mapping[str, tuple[int, int]]) -> Parameters:
    """Return the parameters of adapters as the trainer holds them: Megatron's fused modules share one lora_A.

    Args:
        config: Of the run.
        adapted: Full module name to (in_features, out_features).
    """
    fuses = config.trainer.kind == "megatron"
    halves: dict[str, int] = {}
    for name, (inside, outside) in adapted.items():
        parent, _, leaf = name.rpartition(".")
        halves[f"{parent}.{_FUSED.get(leaf, leaf) if fuses else leaf}.A"] = inside
        halves[f"{name}.B"] = outside

    def total(names: Iterable[str]) -> int:
        return config.lora.rank * sum(halves[name] for name in names)

    return Parameters(total(n for n in halves if not _in_experts(n)), total(filter(_in_experts, halves)))


def _megatron(
    config: RunConfig, trainer: MegatronTrainerConfig, shape: Any, base: Parameters, trained: Parameters
) -> TrainerMemory:
    """Within 5% of what was measured on H200s: 0.6 B on one GPU, two tensor-parallel and two context-parallel ones, 4 B
    on one, two tensor-parallel ones and a pipeline of two."""
    split, stages, ranks = trainer.tensor_parallel_size, trainer.pipeline_parallel_size, trainer.context_parallel_size
    itemsize, lora = _itemsize(config), config.lora.enabled
    tokens = -(-max(trainer.micro_batch_tokens, config.longest_sequence) // ranks)
    embedding = shape.vocab_size * shape.hidden_size
    sharing = trainer.expert_parallel_size * trainer.expert_tensor_parallel_size * stages
    weights = ((base.rest - embedding) // stages + embedding) // split + base.experts // sharing
    # Gradient, master and moments, and a copy in the model's precision, which without adapters is the weight itself.
    bytes_each = 2 * _FLOAT32_BYTES + _MOMENTS_BYTES + (itemsize if lora else 0)
    kept = kept_by_megatron(
        shape,
        rank=config.lora.rank,
        wide=_FLOAT32_BYTES // itemsize,
        ranks=ranks,
        delta_kernels=_delta_kernels(),
    )
    whole = split if trainer.sequence_parallel else 1
    layers = [layer.alike // whole + layer.split // split for layer in kept]
    activations, logits = _larger_end(
        stages,
        activations=tokens * _held(shape, layers, recomputed=trainer.recompute == "full") * itemsize,
        logits=_logits(tokens * shape.vocab_size // split, itemsize),
    )
    return TrainerMemory(
        tokens=tokens,
        weights=weights * itemsize,
        trained=(trained.rest // (split * stages) + trained.experts // sharing) * bytes_each,
        activations=activations,
        logits=logits,
    )


def _larger_end(stages: int, *, activations: int, logits: int) -> tuple[int, int]:
    """Return activations and logits of a pipeline's first or last stage, whichever has more."""
    # The first holds as many batches as there are stages, as much as all layers keep of one; the last one, with logits.
    if stages > 1 and activations > activations // stages + logits:
        return activations, 0
    return activations // stages, logits


def _fsdp(
    config: RunConfig, trainer: FsdpTrainerConfig, shape: Any, base: Parameters, trained: Parameters
) -> TrainerMemory:
    """All is sharded over the ranks; embeddings and two layers, the one at work and the next, are whole."""
    itemsize, ranks, longest = _itemsize(config), trainer.num_processes, config.longest_sequence
    tokens = max(trainer.micro_batch_tokens, longest)
    embeddings = shape.vocab_size * shape.hidden_size * (1 if getattr(shape, "tie_word_embeddings", False) else 2)
    gathered = embeddings + 2 * (base.rest - embeddings) // shape.num_hidden_layers
    kept = kept_by_transformers(
        shape,
        rank=config.lora.rank,
        wide=_FLOAT32_BYTES // itemsize,
        length=longest,
        delta_kernels=_delta_kernels(),
    )
    layers = [layer.alike for layer in kept]
    bytes_each = (_FLOAT32_BYTES if config.lora.enabled else 0) + _FLOAT32_BYTES + _MOMENTS_BYTES
    answers = tokens * (config.rollout.max_new_tokens + 1) // longest
    return TrainerMemory(
        tokens=tokens,
        weights=(base.rest // ranks + (gathered if ranks > 1 else 0)) * itemsize,
        trained=trained.rest // ranks * bytes_each,
        activations=tokens * _held(shape, layers, recomputed=trainer.gradient_checkpointing) * itemsize,
        logits=_logits(answers * shape.vocab_size, itemsize),
    )


def _delta_kernels() -> bool:
    return importlib.util.find_spec("fla") is not None


def _held(shape: Any, layers: list[int], *, recomputed: bool) -> int:
    """Return the numbers a token that are there at once; recomputed layers keep their inputs, but the one at work."""
    return len(layers) * int(shape.hidden_size) + max(layers) if recomputed else sum(layers)


def _logits(count: int, itemsize: int) -> int:
    """Return the bytes of logits and their gradient: `rl.logprobs` makes no copy of them on a GPU."""
    return 2 * count * itemsize


def _itemsize(config: RunConfig) -> int:
    return int(getattr(torch, config.model.dtype).itemsize)


def _in_experts(name: str) -> bool:
    return ".experts." in name
