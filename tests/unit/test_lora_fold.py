from __future__ import annotations

import pytest
import torch

from relax_pipeline.errors import AdapterError
from relax_pipeline.lora.fold import fold

A_RI = torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 0.0]])
B_OR = torch.tensor([[1.0, 0.0], [0.0, 3.0], [1.0, 1.0], [0.0, 0.0]])
DELTA_OI = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0], [1.0, 1.0, 2.0], [0.0, 0.0, 0.0]])


def test_adds_the_scaled_product() -> None:
    weight_OI = torch.arange(12.0).reshape(4, 3)
    merged_OI = fold(weight_OI, lora_A_RI=A_RI, lora_B_OR=B_OR, scaling=0.5)
    assert torch.equal(merged_OI, torch.arange(12.0).reshape(4, 3) + 0.5 * DELTA_OI)


def test_leaves_the_weight_as_it_was() -> None:
    weight_OI = torch.ones(4, 3)
    fold(weight_OI, lora_A_RI=A_RI, lora_B_OR=B_OR, scaling=1.0)
    assert torch.equal(weight_OI, torch.ones(4, 3))


def test_rounds_once_to_the_dtype_of_the_weight() -> None:
    # bfloat16 has 8 bits: 256 + 1 is 256, 256 + 3 is 260. In bfloat16 arithmetic 0.5 * 3 would be added as 1.5.
    weight_OI = torch.full((4, 3), 256.0, dtype=torch.bfloat16)
    merged_OI = fold(weight_OI, lora_A_RI=A_RI.bfloat16(), lora_B_OR=B_OR.bfloat16(), scaling=1.0)
    assert merged_OI.dtype == torch.bfloat16
    expected = [[256.0, 256.0, 258.0], [256.0, 260.0, 256.0], [256.0, 256.0, 258.0], [256.0, 256.0, 256.0]]
    assert merged_OI.tolist() == expected


def test_folds_experts_side_by_side() -> None:
    weight_EOI = torch.zeros(2, 4, 3)
    merged_EOI = fold(
        weight_EOI, lora_A_RI=torch.stack([A_RI, 2 * A_RI]), lora_B_OR=torch.stack([B_OR, B_OR]), scaling=1.0
    )
    assert torch.equal(merged_EOI, torch.stack([DELTA_OI, 2 * DELTA_OI]))


@pytest.mark.parametrize(
    ("weight", "lora_A", "lora_B"),
    [
        ((3, 4), (2, 3), (4, 2)),  # transposed
        ((4, 3), (2, 3), (4, 1)),  # ranks differ
        ((4, 3), (2, 4), (3, 2)),
        ((2, 4, 3), (2, 3), (4, 2)),  # experts, and an adapter for one
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    weight: tuple[int, ...], lora_A: tuple[int, ...], lora_B: tuple[int, ...]
) -> None:
    with pytest.raises(AdapterError, match="does not fit a weight of shape"):
        fold(torch.zeros(weight), lora_A_RI=torch.zeros(lora_A), lora_B_OR=torch.zeros(lora_B), scaling=1.0)
