r"""Scorer `deepscaler`: the \boxed answer after the thinking equals the label; nothing counts without thinking."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from relax_pipeline.rewards.base import OPTIONS, right_or_wrong
from relax_pipeline.rewards.math import boxed, states
from relax_pipeline.types import Score, ScoreRequest


def last_boxed(text: str) -> str | None:
    r"""Return what the last \boxed{...} holds, or None where there is none or its braces do not close."""
    _, opening, rest = text.rpartition(r"\boxed{")
    depth = 1 if opening else 0
    for position, character in enumerate(rest if opening else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:position]
    return None


def solution_of(completion: str) -> str:
    """Return what follows the last `</think>`, else the last `###Response`, else nothing."""
    for marker in ("</think>", "###Response"):
        if marker in completion:
            return completion.rpartition(marker)[2]
    return ""


@dataclass(frozen=True, config=OPTIONS)
class DeepscalerScorer:
    """1 where the boxed answer of the solution equals the label, else 0."""

    def __call__(self, request: ScoreRequest) -> Score:
        """Score one completion."""
        answer = last_boxed(solution_of(request.completion))
        return right_or_wrong(answer is not None and states(boxed(answer), request.label))
