"""What the Megatron trainer cannot do with a model, told from its config.json before any process starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from relax_pipeline.config import MegatronTrainerConfig, RunConfig
from relax_pipeline.errors import ConfigError

_TARGETS = frozenset({"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "router", "in_proj", "out_proj"})
_SEEING = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What config.json calls the number of a layer's experts."""


def check_model(config: RunConfig, hf_config: Mapping[str, Any]) -> None:
    """Refuse what Megatron would refuse in words of its own, and what it would do wrongly without a word.

    Args:
        config: Whose trainer is Megatron; any other passes.
        hf_config: Content of the model's config.json.

    Raises:
        ConfigError: Lists all reasons, each with what to change.
    """
    if not isinstance(config.trainer, MegatronTrainerConfig):
        return
    text_config = hf_config.get("text_config") or hf_config
    reasons = [
        *_modalities(hf_config, text_config),
        *_architecture(text_config),
        *_layout(config.trainer, text_config),
        *_experts(config, config.trainer, text_config),
        *(_adapters(config, config.trainer, text_config) if config.lora.enabled else ()),
    ]
    if reasons:
        raise ConfigError("; ".join(reasons))


def _modalities(hf_config: Mapping[str, Any], text_config: Mapping[str, Any]) -> Iterator[str]:
    if "vision_config" not in hf_config and "audio_config" not in hf_config:
        return
    if hf_config.get("model_type") not in _SEEING:
        yield (
            f"of models with a vision or audio part the Megatron trainer trains {', '.join(_SEEING)}, on text, and not "
            f"{hf_config.get('model_type')}: set trainer.kind to fsdp"
        )
    rope = text_config.get("rope_parameters") or text_config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type", "default")
    if kind not in ("default", "mrope"):
        yield f"Megatron-Bridge drops the {kind!r} rotary scaling of a model that sees: set trainer.kind to fsdp"


def _architecture(hf_config: Mapping[str, Any]) -> Iterator[str]:
    if hf_config.get("kv_lora_rank"):
        yield "the Megatron trainer has no multi-latent attention so far: set trainer.kind to fsdp"
    if hf_config.get("sliding_window") and hf_config.get("use_sliding_window", True):
        yield "the Megatron trainer has no sliding-window attention so far: set trainer.kind to fsdp"
    if hf_config.get("model_type") == "qwen3_next":
        yield "Megatron-Bridge exports qwen3_next's in_proj in the wrong shape: set trainer.kind to fsdp"


def _layout(trainer: MegatronTrainerConfig, hf_config: Mapping[str, Any]) -> Iterator[str]:
    split, context = trainer.tensor_parallel_size, trainer.context_parallel_size
    for name in ("num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size"):
        value = hf_config.get(name)
        if value and value % split:
            yield f"trainer.tensor_parallel_size {split} does not divide the model's {name} {value}: choose another"
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        value = hf_config.get(name)
        if value and value % (split * context):  # ranks that share a sequence divide its delta nets by heads
            yield (
                f"trainer.tensor_parallel_size {split} x trainer.context_parallel_size {context} does not divide the "
                f"model's {name} {value}: choose others"
            )
    layers = hf_config.get("num_hidden_layers", 0)
    pieces = trainer.pipeline_parallel_size * trainer.virtual_pipeline_parallel_size
    if layers % pieces:
        yield (
            f"the model's {layers} layers do not go into {pieces} equal pieces: change trainer.pipeline_parallel_size "
            f"({trainer.pipeline_parallel_size}) or trainer.virtual_pipeline_parallel_size "
            f"({trainer.virtual_pipeline_parallel_size})"
        )


def _experts(config: RunConfig, trainer: MegatronTrainerConfig, hf_config: Mapping[str, Any]) -> Iterator[str]:
    experts = _num_experts(hf_config)
    if not experts:
        for name in ("expert_parallel_size", "expert_tensor_parallel_size"):
            if (size := getattr(trainer, name)) > 1:
                yield f"trainer.{name} is {size} and the model has no experts: set it to 1"
        return
    if experts % trainer.expert_parallel_size:
        yield (
            f"trainer.expert_parallel_size {trainer.expert_parallel_size} does not divide the model's {experts} "
            "experts: choose one that does"
        )
    if trainer.expert_tensor_parallel_size > 1:
        yield (
            f"trainer.expert_tensor_parallel_size is {trainer.expert_tensor_parallel_size}: Megatron-Bridge computes "
            "adapters on split experts wrongly; set it to 1, and raise trainer.expert_parallel_size"
        )
    if not config.saves_lora_only:
        yield (
            "the Megatron trainer's checkpoints hold adapters of experts and no experts: set lora.rank above 0 and "
            "checkpoint.save_lora_only to true"
        )
    if trainer.tensor_parallel_size > 1 and not trainer.sequence_parallel:
        yield "a model with experts and trainer.tensor_parallel_size above 1 needs trainer.sequence_parallel: true"


def _adapters(config: RunConfig, trainer: MegatronTrainerConfig, hf_config: Mapping[str, Any]) -> Iterator[str]:
    if config.lora.rank % trainer.tensor_parallel_size:
        yield (
            f"trainer.tensor_parallel_size {trainer.tensor_parallel_size} does not divide lora.rank "
            f"{config.lora.rank}: Megatron splits adapters along their rank; choose a multiple"
        )
    if fused := sorted(set(config.lora.target_modules) - _TARGETS):
        yield (
            f"lora.target_modules {fused}: the Megatron trainer adapts {', '.join(sorted(_TARGETS))}; name the fused "
            "module, e.g. linear_qkv for linear_q, or set trainer.kind to fsdp"
        )
    if "router" in config.lora.target_modules:
        if not _num_experts(hf_config):
            yield "lora.target_modules holds 'router' and the model has no experts: remove it"
        elif trainer.sequence_parallel:
            yield (
                "lora.target_modules holds 'router', whose adapter Megatron-Bridge computes wrongly under "
                "trainer.sequence_parallel: remove it, or set trainer.tensor_parallel_size to 1"
            )


def _num_experts(hf_config: Mapping[str, Any]) -> int:
    return next((int(hf_config[name]) for name in EXPERT_COUNTS if hf_config.get(name)), 0)
