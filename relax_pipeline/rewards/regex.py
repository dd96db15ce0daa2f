"""Scorer `regex`: what a pattern captures is the label, or, without a group, the pattern occurs."""

from __future__ import annotations

import re

from pydantic.dataclasses import dataclass

from relax_pipeline.rewards.base import OPTIONS, right_or_wrong
from relax_pipeline.types import Score, ScoreRequest


@dataclass(frozen=True, config=OPTIONS)
class RegexScorer:
    """1 where the first group of the last match, without outer spaces, is the label, else 0.

    A pattern without groups scores form, not content: 1 where it occurs anywhere, and no accuracy.
    """

    pattern: re.Pattern[str]
    """Python syntax; flags are written inline, e.g. (?i)."""

    def __call__(self, request: ScoreRequest) -> Score:
        """Score one completion."""
        matches = list(self.pattern.finditer(request.completion))
        if not self.pattern.groups:
            return Score(float(bool(matches)))
        captured = matches[-1][1] if matches else None
        return right_or_wrong(captured is not None and captured.strip() == request.label.strip())
