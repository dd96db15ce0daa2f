"""Key names of LoRA tensors in HF-PEFT form, and the names of what they belong to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from relax_pipeline.errors import AdapterError

PEFT_PREFIX = "base_model.model."
Half = Literal["A", "B"]
HALVES: tuple[Half, Half] = ("A", "B")


def lora_key(module: str, half: Half) -> str:
    """Return the PEFT key of one half of a module's adapter, e.g. base_model.model.….q_proj.lora_A.weight."""
    return f"{PEFT_PREFIX}{module}.lora_{half}.weight"


def parse_lora_key(key: str) -> tuple[str, Half]:
    """Return the module and half that a PEFT key names, the prefix and a `.default` infix being optional.

    Raises:
        AdapterError: The key names no half of a LoRA pair.
    """
    name = key.removeprefix(PEFT_PREFIX).replace(".default.weight", ".weight")
    for half in HALVES:
        suffix = f".lora_{half}.weight"
        if name.endswith(suffix):
            return name.removesuffix(suffix), half
    raise AdapterError(f"{key!r} is no LoRA tensor: expected a name that ends in .lora_A.weight or .lora_B.weight")


def adapted_modules(keys: Iterable[str]) -> tuple[str, ...]:
    """Return the sorted modules that have both halves among the keys.

    Raises:
        AdapterError: A half is missing, with the module's name.
    """
    halves: dict[str, set[Half]] = {}
    for key in keys:
        module, half = parse_lora_key(key)
        halves.setdefault(module, set()).add(half)
    incomplete = sorted(module for module, found in halves.items() if len(found) != 2)
    if incomplete:
        raise AdapterError(f"adapter has only one of lora_A and lora_B for {incomplete[:5]} ({len(incomplete)} in all)")
    return tuple(sorted(halves))


def transformers_name(name: str) -> str:
    """Return the name a weight of a model that sees has in transformers; folders may have that of before 4.52."""
    if name.startswith("visual."):
        return f"model.{name}"
    if name.startswith("model.") and not name.startswith(("model.language_model.", "model.visual.")):
        return f"model.language_model.{name.removeprefix('model.')}"
    return name
