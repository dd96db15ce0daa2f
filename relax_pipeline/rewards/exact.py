"""Scorer `exact`: the completion is the label."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from relax_pipeline.rewards.base import OPTIONS, after_thinking, right_or_wrong
from relax_pipeline.types import Score, ScoreRequest


@dataclass(frozen=True, config=OPTIONS)
class ExactScorer:
    """1 where the completion, after any thinking and without outer spaces, is the label, else 0."""

    ignore_case: bool = False

    def __call__(self, request: ScoreRequest) -> Score:
        """Score one completion."""
        answer, label = after_thinking(request.completion).strip(), request.label.strip()
        if self.ignore_case:
            answer, label = answer.casefold(), label.casefold()
        return right_or_wrong(answer == label)
