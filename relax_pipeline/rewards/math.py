"""Scorer `math`: the completion's final expression equals the label as mathematics."""

from __future__ import annotations

import logging

from math_verify import parse, verify
from pydantic.dataclasses import dataclass

from relax_pipeline.rewards.base import OPTIONS, right_or_wrong
from relax_pipeline.types import Score, ScoreRequest

# Its own time limits are off, which it warns of: they would disarm the alarm of rewards.limits.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def boxed(expression: str) -> str:
    r"""Return the expression as a LaTeX answer, \boxed{expression}."""
    return rf"\boxed{{{expression}}}"


def states(text: str, label: str) -> bool:
    """Return whether the answer that stands in a text equals the label; False where either cannot be read.

    A boxed expression counts before "the answer is", and that before the last expression of the text.
    """
    gold = parse(boxed(label), parsing_timeout=None)
    return bool(verify(gold, parse(text, parsing_timeout=None), timeout_seconds=None))


@dataclass(frozen=True, config=OPTIONS)
class MathScorer:
    """1 where the answer is mathematically equal to the label, else 0."""

    def __call__(self, request: ScoreRequest) -> Score:
        """Score one completion."""
        return right_or_wrong(states(request.completion, request.label))
