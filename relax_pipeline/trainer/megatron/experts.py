"""Grouped experts on plain matrix products, for Megatron's grouped MLP where Transformer Engine is missing.

Megatron's own fallback, one module an expert, exports the wrong experts under expert parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.bridge.models.conversion.param_mapping import AutoMapping
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from relax_pipeline.trainer.megatron.grouped import grouped_linear

# E experts, N tokens sorted by expert, I in_features, O out_features


class _GroupedLinear(nn.Module):
    """One weight an expert, weight0 to weightN as Transformer Engine names them, side by side in memory; no bias."""

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[torch.Tensor], None],
        pg_collection: ProcessGroupCollection,
        bias: bool,
        **_: Any,
    ) -> None:
        super().__init__()
        assert not bias, "experts with a bias need Transformer Engine"
        assert pg_collection.expt_tp.size() == 1, "experts are whole on each rank"
        self.num_gemms, self.in_features, self.out_features = num_gemms, input_size, output_size
        self.config, self.tp_group = config, pg_collection.expt_tp
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        shape = (num_gemms, output_size, input_size)
        self._side_by_side_EOI = torch.empty(shape, dtype=config.params_dtype, device=device)
        for index, values_OI in enumerate(self._side_by_side_EOI):
            weight_OI = nn.Parameter(values_OI)
            init_method(weight_OI)
            weight_OI.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
            self.register_parameter(f"weight{index}", weight_OI)

    def forward(self, x_NI: torch.Tensor, m_splits: Any) -> tuple[torch.Tensor, None]:
        """Return [N, O]; m_splits says how many of the tokens each expert gets."""
        sizes = m_splits.tolist() if isinstance(m_splits, torch.Tensor) else list(m_splits)
        return grouped_linear(x_NI, self._whole(), sizes), None

    def _whole(self) -> torch.Tensor:
        """Return all weights, which do not train, as one tensor [E, O, I] in their memory."""
        weights = [weight for weight in self._parameters.values() if weight is not None]
        start, size = self._side_by_side_EOI.data_ptr(), weights[0].nbytes
        if any(weight.data_ptr() != start + index * size for index, weight in enumerate(weights)):  # they were moved
            self._side_by_side_EOI = torch.stack([weight.data for weight in weights])
            for weight, own_OI in zip(weights, self._side_by_side_EOI, strict=True):
                weight.data = own_OI
        return self._side_by_side_EOI

    def backward_dw(self) -> None:
        """Nothing is left for later."""

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Leave these weights out: checkpoints hold their adapters."""
        return {}


class PortableColumnGroupedLinear(_GroupedLinear):
    """The first linear layer of each expert."""


class PortableRowGroupedLinear(_GroupedLinear):
    """The second linear layer of each expert."""


AutoMapping.register_module_type(PortableColumnGroupedLinear.__name__, "column")
AutoMapping.register_module_type(PortableRowGroupedLinear.__name__, "row")


def portable_experts() -> Any:
    """Return the builder of a layer's experts."""
    submodules = GroupedMLPSubmodules(PortableColumnGroupedLinear, PortableRowGroupedLinear)
    return partial(TEGroupedMLP, submodules=submodules)
