"""The inverse of the adapter's export: values in HF-PEFT names into the masters, under any layout of ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from relax_pipeline.errors import AdapterError
from relax_pipeline.lora.packed import unpacked
from relax_pipeline.trainer.megatron.model import Model
from relax_pipeline.trainer.megatron.optimizer import MasterOptimizer
from relax_pipeline.trainer.megatron.parallel import Ranks
from relax_pipeline.trainer.megatron.stream import AdapterStream


@torch.no_grad()
def load_adapter(tensors: Mapping[str, torch.Tensor], model: Model, optimizer: MasterOptimizer, ranks: Ranks) -> None:
    """Give the masters an adapter's values; all ranks together.

    The export only moves numbers about. So each number's own index is exported in its place, and tells where a value
    of that name and place belongs; what the export shows twice, as the lora_A of q, k and v, must be given alike.

    Args:
        tensors: A whole adapter in float32, in PEFT's names.

    Raises:
        AdapterError: On all ranks: a tensor has another shape, or modules that Megatron fuses differ in their lora_A.
    """
    counts = ranks.gather(sum(master.numel() for master in optimizer.masters.values()))
    first, values_N = sum(counts[: ranks.rank]), torch.full((counts[ranks.rank],), torch.nan)
    problems: list[str] = []
    with optimizer.held_in(model.chunks, _numbered(optimizer, first)):
        for exported, packed in AdapterStream(model).each():
            for name, numbers in unpacked({exported: packed}).items():
                problems += _place(name, numbers, tensors[name], first, values_N)
    if found := [problem for part in ranks.gather(problems[:1]) for problem in part]:
        raise AdapterError(f"lora.start_from: {found[0]}")
    assert not values_N.isnan().any(), "the export leaves a part of the adapter out"
    start = 0
    for master in optimizer.masters.values():
        master.copy_(values_N[start : start + master.numel()].view_as(master))
        start += master.numel()
    optimizer.publish()


def _numbered(optimizer: MasterOptimizer, first: int) -> dict[str, nn.Parameter]:
    """Return numbers from the first on in the masters' places; float64 holds them exactly."""
    numbered = {}
    for name, master in optimizer.masters.items():
        numbers = torch.arange(first, first + master.numel(), dtype=torch.float64, device=master.device)
        numbered[name] = nn.Parameter(numbers.view_as(master))
        first += master.numel()
    return numbered


def _place(name: str, numbers: torch.Tensor, given: torch.Tensor, first: int, values_N: torch.Tensor) -> list[str]:
    """Write those given values whose numbers are this rank's; return what is wrong with them."""
    if given.shape != numbers.shape:
        return [f"{name} is {tuple(given.shape)}, this model's is {tuple(numbers.shape)}"]
    places_M = numbers.flatten().long().cpu() - first
    mine_M = (places_M >= 0) & (places_M < len(values_N))
    places, values = places_M[mine_M], given.flatten()[mine_M]
    before = values_N[places]
    if (~before.isnan() & (before != values)).any():
        return [f"{name} is not that of the modules Megatron fuses it with, which share one; use trainer.kind fsdp"]
    values_N[places] = values
    return []
