"""Several scorers as one: their weighted sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from relax_pipeline.rewards.base import Scorer, score_one
from relax_pipeline.types import Score, ScoreRequest


@dataclass(frozen=True, slots=True)
class Part:
    """One term of the sum."""

    name: str
    """Tells its metrics from those of the other parts."""
    weight: float
    scorer: Scorer


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """Scores with each part and adds up."""

    parts: tuple[Part, ...]

    def __call__(self, request: ScoreRequest) -> Score:
        """Score one completion."""
        return self.combine([score_one(part.scorer, request) for part in self.parts])

    def combine(self, scores: Sequence[Score]) -> Score:
        """Return the sum of the parts' scores of one completion; 0 where a part ran out of time.

        Metrics keep their names; one that several parts report becomes `part/metric`.
        """
        if any(score.timed_out for score in scores):
            return Score(0.0, timed_out=True)
        named = list(zip(self.parts, scores, strict=True))
        count = Counter(metric for score in scores for metric in score.metrics)
        metrics = {
            f"{part.name}/{metric}" if count[metric] > 1 else metric: value
            for part, score in named
            for metric, value in score.metrics.items()
        }
        return Score(sum(part.weight * score.value for part, score in named), metrics)
