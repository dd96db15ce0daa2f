"""Scorer `f1`: overlap of words between completion and label."""

from __future__ import annotations

import string
from collections import Counter

from pydantic.dataclasses import dataclass

from relax_pipeline.rewards.base import OPTIONS, after_thinking
from relax_pipeline.types import Score, ScoreRequest

_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def words(text: str) -> list[str]:
    """Return the words in lower case, without punctuation and articles."""
    found = text.casefold().translate(_WITHOUT_PUNCTUATION).split()
    return [word for word in found if word not in {"a", "an", "the"}]


@dataclass(frozen=True, config=OPTIONS)
class F1Scorer:
    """Harmonic mean of precision and recall over words (Rajpurkar et al. 2016); accuracy: the same words in order."""

    def __call__(self, request: ScoreRequest) -> Score:
        """Score one completion."""
        answer, label = words(after_thinking(request.completion)), words(request.label)
        common = (Counter(answer) & Counter(label)).total()
        f1 = 2 * common / (len(answer) + len(label)) if common else 0.0
        return Score(f1, {"accuracy": float(answer == label)})
