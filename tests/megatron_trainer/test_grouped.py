"""Products of all experts at once, against one product an expert."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SIZES = [3, 0, 7, 0, 2, 0]
EXPERTS, TOKENS, READ, WRITTEN = len(SIZES), sum(SIZES), 16, 8


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def one_by_one(x_NI: torch.Tensor, weights: Any) -> torch.Tensor:
    starts = [sum(SIZES[:expert]) for expert in range(EXPERTS)]
    parts = [x_NI[start : start + size] for start, size in zip(starts, SIZES, strict=True)]
    return torch.cat([functional.linear(part, weight) for part, weight in zip(parts, weights, strict=True)])


def gradients(output: torch.Tensor, *of: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(output, of, drawn(*output.shape, dtype=output.dtype, seed=9).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("written", [WRITTEN, 7], ids=["aligned", "unaligned"])
def test_all_experts_at_once_are_one_after_the_other(dtype: torch.dtype, written: int) -> None:
    from relax_pipeline.trainer.megatron.grouped import grouped_linear

    x_NI, weight_EOI = drawn(TOKENS, READ, dtype=dtype), drawn(EXPERTS, written, READ, dtype=dtype, seed=1)
    output, expected = grouped_linear(x_NI, weight_EOI, SIZES), one_by_one(x_NI, weight_EOI)
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
    for ours, theirs in zip(gradients(output, x_NI, weight_EOI), gradients(expected, x_NI, weight_EOI), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_an_expert_without_tokens_has_no_gradient_whatever_lay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from relax_pipeline.trainer.megatron.grouped import grouped_linear

    product = functional.grouped_mm

    def as_some_gpus_do(left: torch.Tensor, right: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        output = product(left, right, offs=offs)
        if output.ndim == 3:
            output[[expert for expert, size in enumerate(SIZES) if not size]] = torch.nan
        return output

    x_NI, weight_EOI = drawn(TOKENS, READ), drawn(EXPERTS, WRITTEN, READ, seed=1)
    output = grouped_linear(x_NI, weight_EOI, SIZES)
    monkeypatch.setattr(functional, "grouped_mm", as_some_gpus_do)
    (ours,) = gradients(output, weight_EOI)
    (theirs,) = gradients(one_by_one(x_NI, weight_EOI), weight_EOI)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_no_tokens_at_all_leave_a_gradient_of_zero() -> None:
    from relax_pipeline.trainer.megatron.grouped import grouped_linear

    x_NI, weight_EOI = drawn(0, READ), drawn(EXPERTS, WRITTEN, READ)
    output = grouped_linear(x_NI, weight_EOI, [0] * EXPERTS)
    assert output.shape == (0, WRITTEN)
    (gradient,) = torch.autograd.grad(output.sum(), weight_EOI)
    assert torch.equal(gradient, torch.zeros_like(weight_EOI))


def experts() -> Any:
    from relax_pipeline.trainer.megatron.experts import PortableColumnGroupedLinear

    config: Any = SimpleNamespace(use_cpu_initialization=True, params_dtype=torch.float32, expert_model_parallel_size=1)
    alone: Any = SimpleNamespace(expt_tp=SimpleNamespace(size=lambda: 1))
    torch.manual_seed(3)
    layer = PortableColumnGroupedLinear(
        EXPERTS, READ, WRITTEN, config=config, init_method=nn.init.normal_, pg_collection=alone, bias=False
    )
    return layer.requires_grad_(False)


def test_weights_of_experts_that_are_moved_or_replaced_are_those_that_count() -> None:
    layer, x_NI = experts(), drawn(TOKENS, READ)
    own = [name for name, _ in layer.named_parameters()]
    assert own == [f"weight{expert}" for expert in range(EXPERTS)]

    def expected() -> torch.Tensor:
        return one_by_one(x_NI, list(layer.parameters()))

    torch.testing.assert_close(layer(x_NI, SIZES)[0], expected(), rtol=0, atol=0)
    layer.weight2.data = drawn(WRITTEN, READ, seed=5).detach()
    torch.testing.assert_close(layer(x_NI, SIZES)[0], expected(), rtol=0, atol=0)
    with torch.no_grad():
        layer.weight4.mul_(2)
    torch.testing.assert_close(layer(x_NI, SIZES)[0], expected(), rtol=0, atol=0)
    layer.bfloat16()
    x_NI = x_NI.detach().bfloat16()
    torch.testing.assert_close(layer(x_NI, torch.tensor(SIZES))[0], expected(), rtol=0, atol=0)


@pytest.mark.usefixtures("alone")
def test_adapters_of_experts_compute_what_megatron_bridge_does() -> None:
    from megatron.bridge.peft.utils import GroupedExpertLinearAdapter
    from megatron.core.model_parallel_config import ModelParallelConfig

    from relax_pipeline.trainer.megatron.grouped import adapter_forward

    group = torch.distributed.group.WORLD
    adapter = GroupedExpertLinearAdapter(
        READ,
        WRITTEN,
        4,
        num_local_experts=EXPERTS,
        base_linear_name="linear_fc1",
        activation="identity",
        row_init_method="normal",
        model_parallel_config=ModelParallelConfig(params_dtype=torch.float32, use_cpu_initialization=True),
        alpha=12,
        pg_collection=SimpleNamespace(tp=group, ep=group, expt_tp=group, expt_dp=group),  # type: ignore[arg-type]
    )
    x_NI, halves = drawn(TOKENS, READ), (adapter.linear_in.weight, adapter.linear_out.weight)
    ours, theirs = adapter_forward(adapter, x_NI, SIZES), adapter(x_NI, SIZES)
    assert theirs.abs().max() > 0
    torch.testing.assert_close(ours, theirs)
    for own, other in zip(gradients(ours, x_NI, *halves), gradients(theirs, x_NI, *halves), strict=True):
        torch.testing.assert_close(own, other)
