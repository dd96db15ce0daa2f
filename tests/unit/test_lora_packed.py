from __future__ import annotations

import torch

from relax_pipeline.lora.fold import fold
from relax_pipeline.lora.names import lora_key
from relax_pipeline.lora.packed import fold_experts, packed_weight

EXPERTS, INSIDE, INTERMEDIATE, RANK = 3, 5, 4, 2
PARENT = "model.layers.1.mlp.experts"


def adapter() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    shapes = {
        "gate_proj": (INTERMEDIATE, INSIDE),
        "up_proj": (INTERMEDIATE, INSIDE),
        "down_proj": (INSIDE, INTERMEDIATE),
    }
    for expert in range(EXPERTS):
        for leaf, (outside, inside) in shapes.items():
            module = f"{PARENT}.{expert}.{leaf}"
            tensors[lora_key(module, "A")] = torch.randn(RANK, inside, generator=generator)
            tensors[lora_key(module, "B")] = torch.randn(outside, RANK, generator=generator)
    return tensors


def folded_alone(weight_OI: torch.Tensor, module: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    lora_A_RI, lora_B_OR = tensors[lora_key(module, "A")], tensors[lora_key(module, "B")]
    return fold(weight_OI, lora_A_RI=lora_A_RI, lora_B_OR=lora_B_OR, scaling=1.5)


def test_gate_lies_above_up_in_each_expert() -> None:
    weight_EOI, tensors = torch.randn(EXPERTS, 2 * INTERMEDIATE, INSIDE), adapter()
    folded_EOI = fold_experts(weight_EOI, f"{PARENT}.gate_up_proj", tensors, scaling=1.5)
    assert folded_EOI is not None
    for expert in range(EXPERTS):
        gate, up = (weight_EOI[expert, :INTERMEDIATE], weight_EOI[expert, INTERMEDIATE:])
        expected = [
            folded_alone(rows, f"{PARENT}.{expert}.{leaf}", tensors)
            for rows, leaf in ((gate, "gate_proj"), (up, "up_proj"))
        ]
        torch.testing.assert_close(folded_EOI[expert], torch.cat(expected))


def test_down_is_one_matrix_an_expert() -> None:
    weight_EOI, tensors = torch.randn(EXPERTS, INSIDE, INTERMEDIATE), adapter()
    folded_EOI = fold_experts(weight_EOI, f"{PARENT}.down_proj", tensors, scaling=1.5)
    assert folded_EOI is not None
    for expert in range(EXPERTS):
        alone = folded_alone(weight_EOI[expert], f"{PARENT}.{expert}.down_proj", tensors)
        torch.testing.assert_close(folded_EOI[expert], alone)


def test_experts_without_a_delta_are_left_alone() -> None:
    weight_EOI = torch.zeros(EXPERTS, INSIDE, INTERMEDIATE)
    untrained = {name: tensor * (".lora_A." in name) for name, tensor in adapter().items()}
    assert fold_experts(weight_EOI, f"{PARENT}.down_proj", untrained, scaling=1.5) is None
    assert fold_experts(weight_EOI, "model.layers.2.mlp.experts.down_proj", adapter(), scaling=1.5) is None
    assert fold_experts(weight_EOI[0], "model.layers.1.mlp.down_proj.weight", adapter(), scaling=1.5) is None


def test_packed_weight_of_an_expert_is_named() -> None:
    assert packed_weight(f"{PARENT}.2.up_proj") == f"{PARENT}.gate_up_proj"
    assert packed_weight(f"{PARENT}.0.down_proj") == f"{PARENT}.down_proj"
    assert packed_weight("model.layers.1.mlp.shared_expert.up_proj") is None
