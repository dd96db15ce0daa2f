"""The settings of Megatron that it would otherwise read from its command line."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from relax_pipeline.config import MegatronTrainerConfig, ModelConfig
from relax_pipeline.trainer.megatron.compat import HAS_TRANSFORMER_ENGINE
from relax_pipeline.trainer.megatron.spec import portable_spec
from relax_pipeline.trainer.megatron.vision import language_settings

_FUSED_BY_TRANSFORMER_ENGINE = (
    "masked_softmax_fusion",
    "persist_layer_norm",
    "apply_rope_fusion",
    "cross_entropy_loss_fusion",
    "moe_permute_fusion",
    "moe_grouped_gemm",
    "moe_router_fusion",
)


def uses_transformer_engine(settings: MegatronTrainerConfig, device: torch.device) -> bool:
    """Whether the layers are Transformer Engine's."""
    return settings.transformer_engine == "auto" and HAS_TRANSFORMER_ENGINE and device.type == "cuda"


def configure(provider: Any, model: ModelConfig, settings: MegatronTrainerConfig, device: torch.device) -> None:
    """Change a Megatron-Bridge provider's fields, before it is finalised."""
    dtype = getattr(torch, model.dtype)
    tensor, pieces = settings.tensor_parallel_size, settings.virtual_pipeline_parallel_size
    values: dict[str, Any] = {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": False,
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": settings.pipeline_parallel_size,
        "virtual_pipeline_model_parallel_size": pieces if pieces > 1 else None,
        # With both at their defaults, messages to the same neighbour overtake each other.
        "overlap_p2p_comm": pieces > 1,
        "batch_p2p_comm": pieces == 1,
        "context_parallel_size": settings.context_parallel_size,
        "expert_model_parallel_size": settings.expert_parallel_size,
        "expert_tensor_parallel_size": settings.expert_tensor_parallel_size,
        "sequence_parallel": settings.sequence_parallel,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # lengths may vary with this one only, which is checked for dense too
        "calculate_per_token_loss": True,  # gradients are added up: our losses are shares of the step's
        "hetereogenous_dist_checkpoint": True,  # layers by number, so that some of them may have no adapter
        "should_pad_vocab": provider.vocab_size % tensor > 0,
        "make_vocab_size_divisible_by": 1,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": provider.activation_func is functional.silu and provider.gated_linear_unit,
        "mtp_num_layers": None,
        **_recompute(settings),
        **language_settings(provider),
    }
    if provider.num_moe_experts:
        # The base's router is frozen: no balancing loss, and no drift of its bias.
        values |= {
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_bias_update_rate": 0.0,
        }
    if not uses_transformer_engine(settings, device):
        values |= {"transformer_layer_spec": portable_spec} | dict.fromkeys(_FUSED_BY_TRANSFORMER_ENGINE, False)
    if device.type == "cpu":
        values |= {"use_cpu_initialization": True, "bias_dropout_fusion": False}
    for name, value in values.items():
        setattr(provider, name, value)


def _recompute(settings: MegatronTrainerConfig) -> dict[str, Any]:
    match settings.recompute:
        case "none":
            return {"recompute_granularity": None}
        case "selective":
            return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
        case "full":
            return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
