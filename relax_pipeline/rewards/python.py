"""Scorer `python:module.function`: a function of the user's."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from relax_pipeline.errors import RewardError
from relax_pipeline.rewards.base import right_or_wrong
from relax_pipeline.types import Score, ScoreRequest


@dataclass(frozen=True)
class PythonScorer:
    """Calls `function(request, **options)`, which returns a Score, a number, or True for a right answer."""

    path: str
    options: Mapping[str, Any]
    function: Callable[..., Score | float | bool] = field(repr=False)

    def __call__(self, request: ScoreRequest) -> Score:
        """Score one completion."""
        result = self.function(request, **self.options)
        if isinstance(result, Score):
            return result
        return right_or_wrong(result) if isinstance(result, bool) else Score(float(result))


def load_python_scorer(path: str, options: Mapping[str, Any]) -> PythonScorer:
    """Import `module.function`.

    Raises:
        RewardError: There is no such module or function, or it does not take the request and these options.
    """
    module, _, name = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise RewardError(f"scorer python:{path}: {error}; it must be importable where rewards are computed") from error
    if not callable(function):
        raise RewardError(f"scorer python:{path} is a {type(function).__name__}, not a function")
    signature = inspect.signature(function)
    try:
        signature.bind(ScoreRequest("", "", ""), **options)
    except TypeError as error:
        raise RewardError(
            f"scorer python:{path}: {error}; it is called as {name}(request, **options) with options "
            f"{sorted(options)}, and its signature is {name}{signature}"
        ) from None
    return PythonScorer(path, options, function)
