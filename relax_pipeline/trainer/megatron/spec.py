"""A layer spec on torch's own kernels, for machines without Transformer Engine: packed, memory linear in the length."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from relax_pipeline.trainer.megatron.context import Packing, reached_keys
from relax_pipeline.trainer.megatron.experts import portable_experts

# N packed tokens of a rank, M keys they attend to, H heads, D head size


class PortableNorm(nn.Module):
    """RMS or layer norm, also where a sequence is split over ranks and where the stored weight is 0 for 1."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps, self._layer_norm = eps, config.normalization == "LayerNorm"
        self._offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        start = torch.full((hidden_size,), 1.0 - self._offset, dtype=config.params_dtype, device=device)
        self.weight = nn.Parameter(start)
        self.bias = nn.Parameter(torch.zeros_like(start)) if self._layer_norm else None
        for parameter in self.parameters():
            # Each rank sees a part of the sequence, so Megatron adds these gradients over the ranks.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x normalised over its last dimension, in its dtype."""
        if self._layer_norm:
            return functional.layer_norm(x, self.weight.shape, self.weight + self._offset, self.bias, self.eps)
        if self._offset:
            weight = self.weight.float() + self._offset
            return functional.rms_norm(x.float(), self.weight.shape, weight, self.eps).to(x.dtype)
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class PortableAttention(nn.Module):
    """Causal attention within each packed sequence, through scaled_dot_product_attention."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *_: Any,
        pg_collection: ProcessGroupCollection,
        softmax_scale: float | None = None,
        **__: Any,
    ) -> None:
        super().__init__()
        assert config.window_size is None, "sliding-window attention needs Transformer Engine"
        self._scale, self._group = softmax_scale, pg_collection.cp

    def forward(
        self,
        query_NHD: torch.Tensor,
        key_NHD: torch.Tensor,
        value_NHD: torch.Tensor,
        *_: Any,
        packed_seq_params: Packing,
        **__: Any,
    ) -> torch.Tensor:
        """Return [N, H * D]."""
        if packed_seq_params.keys_M is not None:
            key_NHD, value_NHD = reached_keys(key_NHD, value_NHD, packed_seq_params.keys_M, self._group)
        if query_NHD.is_cuda and query_NHD.dtype in (torch.float16, torch.bfloat16):
            return self._all_at_once(query_NHD, key_NHD, value_NHD, packed_seq_params)
        return self._one_by_one(query_NHD, key_NHD, value_NHD, packed_seq_params)

    def _one_by_one(
        self, query_NHD: torch.Tensor, key_MHD: torch.Tensor, value_MHD: torch.Tensor, packed: Packing
    ) -> torch.Tensor:
        outputs = []
        # Not by slices: each would have a gradient as long as N.
        queries = torch.split(query_NHD, packed.bounds_queries.diff().tolist())
        keys, values = (torch.split(x_MHD, packed.bounds_keys.diff().tolist()) for x_MHD in (key_MHD, value_MHD))
        for chunk in zip(queries, keys, values, strict=True):
            query, key, value = (x.transpose(0, 1)[None] for x in chunk)
            earlier = key.shape[2] - query.shape[2]  # keys before the first query
            mask = query.new_ones((query.shape[2], key.shape[2]), dtype=torch.bool).tril(earlier) if earlier else None
            output_1HND = functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=mask is None,
                scale=self._scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            outputs.append(output_1HND[0].transpose(0, 1))
        return torch.cat(outputs).flatten(1)

    def _all_at_once(
        self, query_NHD: torch.Tensor, key_MHD: torch.Tensor, value_MHD: torch.Tensor, packed: Packing
    ) -> torch.Tensor:
        """Use torch's flash attention over packed sequences, which computes in half precision on a GPU only.

        It shares a key among its group of queries by itself, and aligns the causal mask at the ends of a chunk's
        queries and keys.
        """
        output_NHD: torch.Tensor = varlen_attn(  # type: ignore[assignment]
            query_NHD,
            key_MHD,
            value_MHD,
            packed.bounds_queries,
            packed.bounds_keys,
            packed.longest_queries,
            packed.longest_keys,
            scale=self._scale,
            window_size=(-1, 0),  # causal
        )
        return output_NHD.flatten(1)


def portable_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Return the layers this rank builds; a value for a provider's transformer_layer_spec."""
    layers = [_portable(layer) for layer in _layer_specs(config)]
    offset = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=layers[offset : offset + count], layer_norm=PortableNorm)


def _layer_specs(config: TransformerConfig) -> list[ModuleSpec]:
    """Return Megatron's spec of each layer, gated delta nets put where the model has them."""
    gated_delta = config.experimental_attention_variant == "gated_delta_net"
    plain = copy.copy(config)
    plain.experimental_attention_variant = None
    layers = get_gpt_decoder_layer_specs(plain, False, config.normalization, getattr(config, "qk_l2_norm", False))
    if not gated_delta:
        return list(layers)
    submodules = GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=PortableNorm, out_proj=RowParallelLinear
    )
    for number, linear in enumerate(get_linear_attention_pattern(config)):
        layers[number] = copy.deepcopy(layers[number])
        if linear:
            layers[number].submodules.self_attention = ModuleSpec(module=GatedDeltaNet, submodules=submodules)
    return list(layers)


def _portable(layer: ModuleSpec) -> ModuleSpec:
    """Return the spec with norms, attention and experts of this module."""
    layer = copy.deepcopy(layer)
    norms = (WrappedTorchNorm, LocalSpecProvider().layer_norm())
    attention = layer.submodules.self_attention.submodules
    for holder in (layer.submodules, attention):
        for name, value in vars(holder).items():
            if value in norms:
                setattr(holder, name, PortableNorm)
    if hasattr(attention, "core_attention"):
        attention.core_attention = PortableAttention
    mlp = layer.submodules.mlp
    if hasattr(mlp.keywords["submodules"], "experts"):
        experts = copy.copy(mlp.keywords["submodules"])
        experts.experts = portable_experts()
        layer.submodules.mlp = partial(mlp.func, **mlp.keywords | {"submodules": experts})
    return layer
