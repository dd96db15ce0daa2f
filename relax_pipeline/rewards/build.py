"""From configuration to the scorer of a run, and the table of scorer kinds."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable

from pydantic import ValidationError

from relax_pipeline.config import RewardsConfig, ScorerConfig
from relax_pipeline.errors import RewardError
from relax_pipeline.rewards.base import Scorer
from relax_pipeline.rewards.dapo import DapoScorer
from relax_pipeline.rewards.deepscaler import DeepscalerScorer
from relax_pipeline.rewards.exact import ExactScorer
from relax_pipeline.rewards.f1 import F1Scorer
from relax_pipeline.rewards.math import MathScorer
from relax_pipeline.rewards.multiple_choice import MultipleChoiceScorer
from relax_pipeline.rewards.python import load_python_scorer
from relax_pipeline.rewards.regex import RegexScorer
from relax_pipeline.rewards.remote import RemoteScorer
from relax_pipeline.rewards.weighted import Part, WeightedSum

KINDS: dict[str, Callable[..., Scorer]] = {
    "math": MathScorer,
    "dapo": DapoScorer,
    "deepscaler": DeepscalerScorer,
    "exact": ExactScorer,
    "regex": RegexScorer,
    "multiple_choice": MultipleChoiceScorer,
    "f1": F1Scorer,
    "remote": RemoteScorer,
}


def build_scorer(config: RewardsConfig) -> WeightedSum:
    """Return the weighted sum of the configured scorers.

    Raises:
        RewardError: A kind is unknown, or its options are unknown, missing or wrong.
    """
    kinds = [scorer.kind for scorer in config.scorers]
    names = [kind if kinds.count(kind) == 1 else f"{kind}_{i}" for i, kind in enumerate(kinds, start=1)]
    parts = (Part(name, c.weight, _build(c)) for name, c in zip(names, config.scorers, strict=True))
    return WeightedSum(tuple(parts))


def _build(config: ScorerConfig) -> Scorer:
    if config.kind.startswith("python:"):
        return load_python_scorer(config.kind.removeprefix("python:"), config.options)
    factory = KINDS.get(config.kind)
    if factory is None:
        close = difflib.get_close_matches(config.kind, KINDS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise RewardError(f"unknown scorer {config.kind!r}; {hint}known: {', '.join(KINDS)}, python:module.function")
    try:
        return factory(**config.options)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        known = ", ".join(inspect.signature(factory).parameters) or "none"
        raise RewardError(f"scorer {config.kind}: {problems}; its options: {known}") from None
