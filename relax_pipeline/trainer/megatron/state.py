"""The Megatron trainer's sharded state on disk, through megatron.core.dist_checkpointing.

Masters and Adam moments are stored under the names and places of the model's own parameters, so any other layout of
ranks finds its part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from relax_pipeline.errors import CheckpointError
from relax_pipeline.trainer.megatron.optimizer import MasterOptimizer
from relax_pipeline.trainer.megatron.parallel import Ranks
from relax_pipeline.trainer.megatron.sharding import placements

UPDATES = "optimizer_updates"


def load_state(
    folder: Path,
    chunks: Sequence[nn.Module],
    optimizer: MasterOptimizer,
    ranks: Ranks,
    *,
    frozen: Mapping[str, nn.Parameter],
) -> int:
    """Load what `saving` wrote, under any layout of ranks; return the optimizer steps taken.

    Raises:
        CheckpointError: The folder holds other parameters, other shapes, or cannot be read.
    """
    blank = {
        key: {n: torch.empty_like(t) for n, t in part.items()} for key, part in state_values(optimizer, frozen).items()
    }
    state = placed(chunks, optimizer, ranks, frozen, values=blank)
    try:
        difference = dist_checkpointing.load_tensors_metadata(str(folder)).keys() ^ set().union(
            *ranks.gather(_keys(state))
        )
        if difference:
            raise CheckpointError(
                f"{folder} and this trainer differ in {len(difference)} parameters, e.g. {sorted(difference)[:3]}"
            )
        loaded = dist_checkpointing.load(state, str(folder), strict="raise_all")
    except (OSError, ValueError, RuntimeError, KeyError, CheckpointingException, CheckpointException) as error:
        raise CheckpointError(f"{folder} cannot be loaded: {reason(error)}") from error
    updates = int(loaded[UPDATES])
    with torch.no_grad():
        for name, master in optimizer.masters.items():
            master.copy_(loaded["parameter"][name])
            moments = {key: loaded[key][name].to(master.device) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.set_moments(name, moments, updates=updates)
        for name, parameter in frozen.items():
            parameter.copy_(loaded["base"][name])
    optimizer.clear()
    optimizer.publish()
    return updates


def state_values(optimizer: MasterOptimizer, frozen: Mapping[str, nn.Parameter]) -> dict[str, dict[str, torch.Tensor]]:
    """Return what a checkpoint holds, by kind and by the parameter's name; nothing is copied."""
    values: dict[str, dict[str, torch.Tensor]] = {
        "parameter": {name: master.detach() for name, master in optimizer.masters.items()},
        "exp_avg": {},
        "exp_avg_sq": {},
        "base": {name: parameter.detach() for name, parameter in frozen.items()},
    }
    for name in optimizer.masters:
        for key, moment in optimizer.moments(name).items():
            values[key][name] = moment
    return values


def placed(
    chunks: Sequence[nn.Module],
    optimizer: MasterOptimizer,
    ranks: Ranks,
    frozen: Mapping[str, nn.Parameter],
    *,
    values: Mapping[str, Mapping[str, torch.Tensor]],
) -> dict[str, Any]:
    """Return the values with the places of their parameters.

    Raises:
        CheckpointError: A parameter has no place in a checkpoint.
    """
    places = placements(chunks, ranks.groups)
    state: dict[str, Any] = {}
    for key, tensors in values.items():
        owners = frozen if key == "base" else optimizer.parameters
        if homeless := [name for name in tensors if owners[name] not in places]:
            raise CheckpointError(
                f"{len(homeless)} parameters cannot be saved in Megatron's format, e.g. {homeless[0]}: "
                "set checkpoint.save_lora_only to true"
            )
        state[key] = {n: make_sharded_optimizer_tensor(places[owners[n]], t, key) for n, t in tensors.items()}
    return state


def _keys(state: Mapping[str, Any]) -> set[str]:
    """Return the names of the tensors that will be asked for."""
    keys: set[str] = set()
    for place in nested_values(state):
        parts = nested_values(place.build()) if isinstance(place, ShardedTensorFactory) else [place]
        keys |= {part.key for part in parts}
    return keys


def reason(error: BaseException) -> str:
    """Return what went wrong, on the first rank where it did, without the traceback."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}"
