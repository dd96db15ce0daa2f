"""Our requests as SGLang's JSON, and its answers as ours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_pipeline.errors import EngineError
from relax_pipeline.types import Completion, GenerateRequest


def generate_body(requests: Sequence[GenerateRequest], *, adapter: str | None, seeded: bool) -> dict[str, Any]:
    """Return the body of /generate for a batch; the logprobs it answers are those `Completion` wants."""
    return {
        "input_ids": [list(request.token_ids) for request in requests],
        "sampling_params": [_sampling(request, seeded=seeded) for request in requests],
        "return_logprob": True,
        "lora_path": [adapter] * len(requests) if adapter else None,
    }


def logprobs_body(sequences: Sequence[Sequence[int]], *, adapter: str | None) -> dict[str, Any]:
    """Return the body of /generate that scores whole sequences: no token is drawn, no cache is used."""
    return {
        "input_ids": [list(sequence) for sequence in sequences],
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "lora_path": [adapter] * len(sequences) if adapter else None,
    }


def completion(answer: Mapping[str, Any], *, policy_version: int, engine_id: str, incarnation: str) -> Completion:
    """Return one answer of /generate as a completion.

    Raises:
        EngineError: A logprob is missing or NaN, or the request was cut short by the server.
    """
    meta = answer["meta_info"]
    reason = meta["finish_reason"]
    scored = meta["output_token_logprobs"]
    if reason["type"] not in ("stop", "length"):
        raise EngineError(f"engine {engine_id}: SGLang ended a request with {reason}")
    if [token for _, token, _ in scored] != answer["output_ids"]:
        raise EngineError(f"engine {engine_id}: SGLang gave logprobs of other tokens than those it sampled")
    if any(value is None for value, _, _ in scored):
        raise EngineError(f"engine {engine_id}: SGLang gave a logprob that is NaN; its weights are not finite")
    return Completion(
        token_ids=np.array(answer["output_ids"], dtype=np.int64),
        rollout_logprobs=np.array([value for value, _, _ in scored], dtype=np.float32),
        finish_reason=reason["type"],
        policy_version=policy_version,
        engine_id=engine_id,
        incarnation=incarnation,
    )


def sequence_logprobs(answer: Mapping[str, Any]) -> NDArray[np.float32]:
    """Return the logprobs of all tokens after the first; SGLang writes NaN as null."""
    values = [value for value, _, _ in answer["meta_info"]["input_token_logprobs"][1:]]
    return np.array([math.nan if value is None else value for value in values], dtype=np.float32)


def _sampling(request: GenerateRequest, *, seeded: bool) -> dict[str, Any]:
    sampling = request.sampling
    values: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": not sampling.stop_token_ids,  # else SGLang would skip these stop tokens, too
    }
    return values | {"sampling_seed": request.seed} if seeded else values
