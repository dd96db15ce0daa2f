"""What a scorer is, and what every score is checked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from pydantic import ConfigDict

from relax_pipeline.errors import RewardError
from relax_pipeline.types import Score, ScoreRequest

OPTIONS = ConfigDict(extra="forbid")
"""Each kind of scorer is a pydantic dataclass with this configuration; its fields are the kind's options."""


class Scorer(Protocol):
    """Scores one completion. Picklable: scorers are built in one process and run in others."""

    def __call__(self, request: ScoreRequest) -> Score:
        """Score one completion."""
        ...


@runtime_checkable
class BatchScorer(Protocol):
    """A scorer that takes many completions in one go and keeps its own time limit."""

    def score_many(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Score each completion, in order."""
        ...


def right_or_wrong(correct: bool, *, wrong: float = 0.0) -> Score:
    """Return 1 for a right answer and `wrong` for the others, with the metric `accuracy`."""
    return Score(1.0 if correct else wrong, {"accuracy": float(correct)})


def after_thinking(text: str) -> str:
    """Return what follows the last `</think>`, or all of the text where nothing was thought."""
    return text.rpartition("</think>")[2]


def score_one(scorer: Scorer, request: ScoreRequest) -> Score:
    """Run one scorer on one completion.

    Raises:
        RewardError: The scorer raised, or its value is not finite; a wrong completion has to get a low score instead.
    """
    try:
        score = scorer(request)
    except RewardError:
        raise
    except Exception as error:
        problem = f"raised {type(error).__name__}: {error}"
        raise RewardError(f"{scorer!r} on label {request.label!r} {problem}; it must score any completion") from error
    if not math.isfinite(score.value):
        raise RewardError(f"{scorer!r} on label {request.label!r} returned {score.value}; a score must be finite")
    return score
