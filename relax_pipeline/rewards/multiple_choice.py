"""Scorer `multiple_choice`: the letter a completion decides on is the label."""

from __future__ import annotations

import re

from pydantic.dataclasses import dataclass

from relax_pipeline.errors import RewardError
from relax_pipeline.rewards.base import OPTIONS, after_thinking, right_or_wrong
from relax_pipeline.types import Score, ScoreRequest

_DECISIONS = (
    r"\\boxed\{(?:\\text\{)?\s*\(?([A-Z])\)?\s*\}",
    r"(?i:answer)(?i:\s+is)?\s*:?[\s*$(]*([A-Z])\b",
    r"\A[^\w(]*([A-Z])(?:[).:]|\W*\Z)",
    r"\(([A-Z])\)",
)
"""How an answer is given away, the surest first."""


def chosen_letter(text: str) -> str | None:
    r"""Return the letter decided on: boxed, else after "answer is", else what the text starts with, else in brackets.

    Of several decisions of one form the last one counts.
    """
    for pattern in _DECISIONS:
        if letters := re.findall(pattern, text):
            return str(letters[-1])
    return None


@dataclass(frozen=True, config=OPTIONS)
class MultipleChoiceScorer:
    """1 where the letter chosen after any thinking is the label, else 0.

    Raises:
        RewardError: The label is not one letter.
    """

    def __call__(self, request: ScoreRequest) -> Score:
        """Score one completion."""
        label = re.fullmatch(r"\s*\(?([A-Za-z])[).]?\s*", request.label)
        if label is None:
            raise RewardError(
                f"multiple_choice: label {request.label!r} is not one letter such as B; fix the label or label_key"
            )
        return right_or_wrong(chosen_letter(after_thinking(request.completion)) == label[1].upper())
