"""Names a module goes by: a checkpoint on disk and the model that transformers builds from it do not always agree."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator

from relax_pipeline.errors import MergeError

PREFIXES = (
    ("model.language_model.", "language_model.model.", "model.", ""),
    ("model.visual.", "visual."),
    ("model.vision_tower.", "vision_tower."),
    ("model.vision_model.", "vision_model."),
    ("model.audio_tower.", "audio_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("lm_head.", "language_model.lm_head."),
)
"""Interchangeable beginnings: text models and multimodal ones, before and after transformers 4.52."""
INFIXES = ((".mlp.", ".block_sparse_moe."),)
"""Mixtral since transformers 5."""
EXPERT_LEAVES = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
EXPERT = re.compile(r"(?P<parent>.+\.experts)\.(?P<index>\d+)\.(?P<leaf>\w+)")


def aliases(module: str) -> Iterator[str]:
    """Yield the names a module may have in a checkpoint, its own first."""
    for renamed in _swap_prefix(module):
        for spelled in _swap_infix(renamed):
            yield from _swap_expert_leaf(spelled)


def find_name(module: str, names: Container[str]) -> str | None:
    """Return the one name of the module that is among `names`; its own spelling wins.

    Raises:
        MergeError: Several other spellings are there.
    """
    if module in names:
        return module
    found = sorted({name for name in aliases(module) if name in names})
    if len(found) > 1:
        raise MergeError(f"adapter module {module} could be any of {found} in the base; rename the adapter's keys")
    return found[0] if found else None


def _swap_prefix(name: str) -> Iterator[str]:
    yield name
    dotted = f"{name}."
    for group in PREFIXES:
        for old in group:
            if dotted.startswith(old):
                yield from (f"{new}{dotted.removeprefix(old)}".rstrip(".") for new in group if new != old)


def _swap_infix(name: str) -> Iterator[str]:
    yield name
    for one, other in INFIXES:
        if one in name:
            yield name.replace(one, other)
        if other in name:
            yield name.replace(other, one)


def _swap_expert_leaf(name: str) -> Iterator[str]:
    yield name
    match = EXPERT.fullmatch(name)
    for one, other in EXPERT_LEAVES if match else ():
        if match and match["leaf"] in (one, other):
            yield f"{match['parent']}.{match['index']}.{other if match['leaf'] == one else one}"
