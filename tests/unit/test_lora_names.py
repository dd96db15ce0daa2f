from __future__ import annotations

import pytest

from relax_pipeline.errors import AdapterError
from relax_pipeline.lora.names import adapted_modules, lora_key, parse_lora_key

Q = "model.layers.0.self_attn.q_proj"


def test_key_is_what_peft_writes() -> None:
    assert lora_key(Q, "A") == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    "key",
    [
        f"base_model.model.{Q}.lora_B.weight",
        f"{Q}.lora_B.weight",
        f"base_model.model.{Q}.lora_B.default.weight",
    ],
)
def test_prefix_and_adapter_name_are_optional(key: str) -> None:
    assert parse_lora_key(key) == (Q, "B")


@pytest.mark.parametrize("key", [f"{Q}.weight", f"{Q}.lora_C.weight", f"{Q}.lora_A.bias", f"{Q}.lora_magnitude_vector"])
def test_other_tensors_are_refused(key: str) -> None:
    with pytest.raises(AdapterError, match=r"is no LoRA tensor: expected a name that ends in \.lora_A\.weight"):
        parse_lora_key(key)


def test_modules_are_sorted_and_need_both_halves() -> None:
    keys = [lora_key(module, half) for module in ("b", "a") for half in ("B", "A")]
    assert adapted_modules(keys) == ("a", "b")


def test_half_a_pair_is_named() -> None:
    with pytest.raises(AdapterError, match=r"only one of lora_A and lora_B for \['a'\] \(1 in all\)"):
        adapted_modules([lora_key("a", "A"), lora_key("b", "A"), lora_key("b", "B")])
