"""Scorer `remote`: an HTTP service that scores a batch of completions in one call."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import httpx
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from pydantic.dataclasses import dataclass

from relax_pipeline.errors import RewardError
from relax_pipeline.rewards.base import OPTIONS
from relax_pipeline.types import Score, ScoreRequest


class _DetailedScore(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    value: FiniteFloat
    metrics: dict[str, FiniteFloat] = {}


class _Reply(BaseModel):
    model_config = ConfigDict(strict=True)
    scores: list[FiniteFloat | _DetailedScore]


@dataclass(frozen=True, config=OPTIONS)
class RemoteScorer:
    """Posts `{"samples": [{prompt, completion, label, metadata}]}`, reads `{"scores": [number or {value, metrics}]}`.

    Server errors (5xx) and failed connections are tried again, with a pause that doubles each time.
    """

    url: Annotated[str, Field(pattern="^https?://")]
    timeout_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Of one call, which carries a whole batch."""
    attempts: Annotated[int, Field(ge=1)] = 4
    backoff_seconds: Annotated[float, Field(ge=0)] = 1.0
    """Pause after the first failure."""

    def __call__(self, request: ScoreRequest) -> Score:
        """Score one completion."""
        return self.score_many([request])[0]

    def score_many(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Score a batch with one call.

        Raises:
            RewardError: The service fails all attempts or refuses the samples, or its answer does not fit them.
        """
        if not requests:
            return []
        response = self._post({"samples": [asdict(request) for request in requests]})
        try:
            scores = _Reply.model_validate_json(response.content).scores
        except ValidationError as error:
            raise RewardError(f'{self.url} must answer {{"scores": [number, ...]}}, all finite: {error}') from error
        if len(scores) != len(requests):
            raise RewardError(
                f"{self.url} answered {len(scores)} scores for {len(requests)} samples; send one for each"
            )
        return [Score(s.value, s.metrics) if isinstance(s, _DetailedScore) else Score(s) for s in scores]

    def _post(self, payload: object) -> httpx.Response:
        # Dates and decimals from Parquet columns travel as text.
        body = json.dumps(payload, default=str)
        headers = {"Content-Type": "application/json"}
        for attempt in range(self.attempts):
            if attempt:
                time.sleep(self.backoff_seconds * 2 ** (attempt - 1))
            try:
                response = httpx.post(self.url, content=body, headers=headers, timeout=self.timeout_seconds)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if response.is_success:
                return response
            problem = f"status {response.status_code}: {response.text[:200]!r}"
            if not response.is_server_error:
                raise RewardError(f"{self.url} refused the samples with {problem}")
        raise RewardError(f"{self.url} failed {self.attempts} times, at last with {problem}; is the service up?")
