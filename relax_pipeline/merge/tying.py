"""Models whose head is their embedding: where an adapter changes one of the two, the head is written out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from relax_pipeline.merge.base import Base
from relax_pipeline.merge.names import find_name
from relax_pipeline.merge.weights import Weight

EMBEDDING = re.compile(r"(?P<prefix>|model\.|model\.language_model\.|language_model\.model\.)embed_tokens")
HEADED = re.compile(r"ForCausalLM|ForConditionalGeneration|LMHeadModel")
FLAG = "tie_word_embeddings"


@dataclass(frozen=True)
class Tie:
    """The tie of a base."""

    embedding: Weight
    head: Weight
    """The head's own tensor, or the embedding under the head's name."""
    head_is_stored: bool


def find_tie(base: Base, weights: Mapping[str, Weight]) -> Tie | None:
    """Return the tie between head and embedding, or None where they are two weights or the model has no head.

    A config that does not mention the tie means the class's default; a model class with a head and no head tensor
    is tied.
    """
    found = [match for module in weights if (match := EMBEDDING.fullmatch(module))]
    head = find_name("lm_head", weights)
    flags = [config[FLAG] for config in (base.config, base.text_config) if FLAG in config]
    has_head = any(HEADED.search(name) for name in base.config.get("architectures") or ())
    is_tied = any(flags) or (not flags and has_head and head is None)
    if len(found) != 1 or not is_tied:
        return None
    embedding = weights[found[0][0]]
    if head is not None:
        return Tie(embedding, weights[head], head_is_stored=True)
    module = "language_model.lm_head" if found[0]["prefix"] == "language_model.model." else "lm_head"
    return Tie(embedding, replace(embedding, module=module, name=f"{module}.weight"), head_is_stored=False)


def untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model config that says at all levels that head and embedding are two weights."""

    def clear(level: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: False if key == FLAG else clear(value) if isinstance(value, dict) else value
            for key, value in level.items()
        }

    result = {**clear(config), FLAG: False}
    if isinstance(result.get("text_config"), dict):
        result["text_config"][FLAG] = False
    return result
