"""How large a model and its adapters are, counted on a model without weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from relax_pipeline.config import RunConfig
from relax_pipeline.errors import ConfigError, ModelError
from relax_pipeline.inputs import check_model_folder
from relax_pipeline.lora.scope import in_vision_region, resolve_targets
from relax_pipeline.memory import (
    Parameters,
    TrainerMemory,
    adapter_parameters,
    expert_share,
    trainer_memory,
)
from relax_pipeline.memory_gpu import EngineMemory, engine_memory
from relax_pipeline.models import adaptable_shapes, base_state, model_class, refuse_packed_experts

_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Parameters and bytes."""

    base_parameters: int
    adapter_parameters: int
    """0 where lora.rank is 0 and all weights train."""
    adapted_modules: int
    adapter_bytes: int
    """One sync in adapter mode, to each engine."""
    merged_bytes: int
    """One sync in merge mode, to each engine: every weight in model.dtype."""
    checkpoint_bytes: int
    """One save: what trains and its two Adam moments in float32, the adapter again for peft, the base where asked."""
    trainer_memory: TrainerMemory | None
    """Of a rank, where it can be told."""
    engine_memory: EngineMemory | None
    """Of an engine's GPU, where it can be told."""


def measure_model(config: RunConfig) -> ModelSizes:
    """Count the base and the adapters it would get.

    Raises:
        ModelError: The folder holds no model that can be loaded, or none that the engines serve as it is.
        ConfigError: A target matches no module, a vision or audio part would get adapters that cannot train or be
            served, or sequences may become longer than the model can read.
    """
    model = _empty_model(config)
    text_config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    _check_lengths(config, getattr(text_config, "max_position_embeddings", None))
    _check_head(model.config, config)
    state = base_state(model)
    if config.trainer.kind == "fsdp":
        refuse_packed_experts(model, config.lora)
    shapes = adaptable_shapes(model, experts=config.trainer.kind == "megatron")
    adapted = {name: shapes[name] for name in resolve_targets(shapes, config.lora)} if config.lora.enabled else {}
    adapter = sum(config.lora.rank * (in_features + out_features) for in_features, out_features in adapted.values())
    base = sum(parameter.numel() for parameter in model.parameters())
    unseen = sum(p.numel() for name, p in model.named_parameters() if in_vision_region(name))
    held = base - unseen if config.trainer.kind == "megatron" else base  # which builds the language part alone
    parameters = Parameters(held - expert_share(shapes), expert_share(shapes))
    itemsize: int = getattr(torch, config.model.dtype).itemsize
    copies = 4 if config.lora.enabled else 3  # the trained values, two moments, and the folder for peft
    merged = sum(tensor.numel() for tensor in state.values()) * itemsize
    frozen = base if config.lora.enabled and not config.saves_lora_only else 0
    return ModelSizes(
        base_parameters=base,
        adapter_parameters=adapter,
        adapted_modules=len(adapted),
        adapter_bytes=adapter * itemsize,
        merged_bytes=merged,
        checkpoint_bytes=copies * _FLOAT32_BYTES * (adapter or base) + frozen * itemsize,
        trainer_memory=trainer_memory(
            config,
            text_config,
            base=parameters,
            trained=adapter_parameters(config, adapted) if adapted else parameters,
        ),
        engine_memory=engine_memory(config, text_config, model_bytes=merged, adapter_bytes=adapter * itemsize),
    )


def _empty_model(config: RunConfig) -> nn.Module:
    """Build the model on the meta device, after checking that its adapters can be served as asked."""
    check_model_folder(config)
    folder, trust = Path(config.model.path), config.model.trust_remote_code
    try:
        described = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
        _check_modalities(described, config)
        with torch.device("meta"):
            model: nn.Module = model_class(described).from_config(described, trust_remote_code=trust)
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path: transformers cannot build the model in {folder}: {error}") from error
    return model


def _check_modalities(described: Any, config: RunConfig) -> None:
    parts = [name for name in ("vision_config", "audio_config") if getattr(described, name, None) is not None]
    if parts and config.lora.enabled and config.lora.scope == "vision":
        raise ConfigError(
            "lora.scope is vision, and prompts are text so far: no adapter there would ever train; set it to language"
        )
    if parts and config.lora.enabled and config.lora.scope == "all" and config.sync.mode == "adapter":
        raise ConfigError(
            f"the base declares {' and '.join(parts)}, and engines load adapters for its language part only: "
            "set lora.scope to language, or sync.mode to merge"
        )


def _check_head(described: Any, config: RunConfig) -> None:
    """Refuse a tied head that SGLang 0.5.16 has no weights for: its class for these mixtures makes one of its own."""
    mixture = "Qwen3MoeForCausalLM" in (getattr(described, "architectures", None) or ())
    if config.engine.kind == "sglang" and mixture and described.tie_word_embeddings:
        raise ModelError(
            f"model.path {config.model.path} ties its head to the embedding, and SGLang would serve a head that was "
            "never loaded: save the model with tie_word_embeddings false, or use another engine.kind"
        )


def _check_lengths(config: RunConfig, max_positions: int | None) -> None:
    """Refuse lengths the model was not made for: it would answer, and wrongly, without a word."""
    prompt = config.data.max_prompt_tokens
    longest = config.rollout.max_new_tokens
    if config.evaluation and config.evaluation.max_new_tokens:
        longest = max(longest, config.evaluation.max_new_tokens)
    if max_positions is not None and prompt + longest > max_positions:
        raise ConfigError(
            f"data.max_prompt_tokens {prompt} and {longest} new tokens exceed the {max_positions} positions of the "
            f"model; lower data.max_prompt_tokens to {max(1, max_positions - longest)}, or the new tokens"
        )
