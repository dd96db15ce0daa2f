"""Adapter tensor names: which module each belongs to and which part of its adapter it is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from relax_pipeline.errors import AdapterError
from relax_pipeline.lora.names import PEFT_PREFIX

Part = Literal["A", "B", "embedding_A", "embedding_B", "magnitude", "base_copy", "whole"]

PART_PATTERNS: tuple[tuple[str, Part], ...] = (
    (r"(?P<module>.+)\.lora_A(\.\w+)?\.weight", "A"),
    (r"(?P<module>.+)\.lora_B(\.\w+)?\.weight", "B"),
    (r"(?P<module>.+)\.lora_embedding_A(\.\w+)?", "embedding_A"),
    (r"(?P<module>.+)\.lora_embedding_B(\.\w+)?", "embedding_B"),
    (r"(?P<module>.+)\.lora_magnitude_vector(\.\w+)?(\.weight)?", "magnitude"),
    (r"(?P<module>.+)\.base_layer\.weight", "base_copy"),
)
"""`(\\.\\w+)?` is the adapter's name, which peft writes in a training state and leaves out of a saved one."""
UNKNOWN = re.compile(r"\.lora_|\.original_module\.|trainable_tokens|\.base_layer\.|\.parametrizations\.")


def parse_keys(keys: Iterable[str]) -> dict[str, dict[Part, str]]:
    """Return module name to the parts its adapter has, each with its key in the file.

    A `whole` part is a tensor that replaces the base's (modules_to_save, trained biases); its module is the full
    tensor name.

    Raises:
        AdapterError: A key that is none of these, two keys for one part, or half a pair.
    """
    modules: dict[str, dict[Part, str]] = {}
    for key in sorted(keys):
        module, part = parse_key(key)
        parts = modules.setdefault(module, {})
        if part in parts:
            raise AdapterError(
                f"{key} and {parts[part]} both are part {part} of {module}; keep one adapter in the file"
            )
        parts[part] = key
    for module, parts in modules.items():
        _check_parts(module, parts)
    return modules


def parse_key(key: str) -> tuple[str, Part]:
    """Return the module and the part that one adapter tensor is.

    Raises:
        AdapterError: It is none that can be merged.
    """
    name = key.removeprefix(PEFT_PREFIX)
    for pattern, part in PART_PATTERNS:
        match = re.fullmatch(pattern, name)
        if match:
            return match["module"], part
    if UNKNOWN.search(name):
        raise AdapterError(f"adapter tensor {key} is of a kind that cannot be merged; remove it or train without it")
    return re.sub(r"\.modules_to_save(\.default)?\.", ".", name), "whole"


def _check_parts(module: str, parts: dict[Part, str]) -> None:
    found = set(parts) - {"magnitude", "base_copy"}
    if found not in ({"A", "B"}, {"embedding_A", "embedding_B"}, {"whole"}):
        raise AdapterError(f"adapter of {module} is incomplete: it has only {sorted(parts.values())}")
