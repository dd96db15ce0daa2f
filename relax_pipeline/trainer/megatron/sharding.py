"""Where this rank's tensors lie within the whole model's: names and places that no layout of ranks changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.utils import _split_tensor_factory
from torch import nn

from relax_pipeline.seeds import derive_seed

Placement: TypeAlias = ShardedTensor | ShardedTensorFactory


def placements(chunks: Sequence[nn.Module], groups: ProcessGroupCollection) -> dict[nn.Parameter, Placement]:
    """Return where each parameter of this rank belongs; parameters that Megatron cannot place are absent."""
    places: dict[nn.Parameter, Placement] = {}
    for chunk in chunks:
        state = chunk.sharded_state_dict(metadata={"dp_cp_group": groups.dp_cp})  # type: ignore[operator]
        _place_gated_delta_adapters(chunk, state)
        parameters = {id(parameter): parameter for parameter in chunk.parameters()}
        for place in nested_values(extract_sharded_tensors_and_factories(state)[0]):
            if id(place.data) in parameters:
                places[parameters[id(place.data)]] = place
    return places


def copies(parameter: nn.Parameter, groups: ProcessGroupCollection) -> int:
    """Return how many ranks hold the same values of this parameter."""
    split = getattr(parameter, "tensor_model_parallel", False)
    if not getattr(parameter, "allreduce", True):  # of an expert
        return int(groups.expt_dp.size() * (1 if split else groups.expt_tp.size()))
    shared_with_first_stage = 2 if groups.pp.size() > 1 and getattr(parameter, "shared_embedding", False) else 1
    return int(groups.dp_cp.size() * (1 if split else groups.tp.size()) * shared_with_first_stage)


@torch.no_grad()
def initialise_adapters(chunks: Sequence[nn.Module], groups: ProcessGroupCollection, seed: int) -> None:
    """Draw lora_A from U(-1/sqrt(in), 1/sqrt(in)), as peft does; the same values whatever the layout.

    Each whole matrix is drawn from a stream of its own and this rank keeps its part. lora_B is zero already.
    """
    for parameter, place in placements(chunks, groups).items():
        if not parameter.requires_grad or ".linear_in." not in place.key:
            continue
        assert isinstance(place, ShardedTensor)
        generator = torch.Generator().manual_seed(derive_seed(seed, "adapter", place.key))
        bound = 1 / math.sqrt(place.global_shape[-1])
        whole = torch.empty(place.global_shape).uniform_(-bound, bound, generator=generator)
        part = tuple(
            slice(offset, offset + size) for offset, size in zip(place.global_offset, parameter.shape, strict=True)
        )
        parameter.copy_(whole[part])


def _place_gated_delta_adapters(chunk: nn.Module, state: dict[str, Any]) -> None:
    """Split lora_B of in_proj as Megatron splits its base weight: q, k, v, z, beta and alpha apart.

    Megatron-Bridge places it as one tensor, so that another number of ranks would read rows of its neighbours.
    """
    for name, module in chunk.named_modules():
        if isinstance(module, GatedDeltaNet) and hasattr(module.in_proj, "adapter"):
            key = f"{name}.in_proj.adapter.linear_out.weight"
            state[key] = _split_tensor_factory(state[key], module.in_proj_split_sections, module.in_proj_split_names, 0)
