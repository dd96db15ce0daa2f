from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from relax_pipeline.rollout.sampling import sample_tokens, uniform_stream
from relax_pipeline.types import SamplingParams

# Probabilities 0.1, 0.4, 0.2, 0.3 at temperature 1; cumulated 0.1, 0.5, 0.7, 1.
LOGITS = torch.log(torch.tensor([[1.0, 4.0, 2.0, 3.0]]))


def draw(uniform: float, **params: float) -> tuple[int, float]:
    sampling = SamplingParams(max_new_tokens=1, **params)  # type: ignore[arg-type]
    tokens, logprobs = sample_tokens(LOGITS, torch.tensor([uniform], dtype=torch.float64), [sampling])
    return int(tokens), math.exp(float(logprobs))


@pytest.mark.parametrize(
    ("uniform", "token", "probability"),
    [(0.0, 0, 0.1), (0.099, 0, 0.1), (0.101, 1, 0.4), (0.6, 2, 0.2), (0.999, 3, 0.3)],
)
def test_token_is_where_the_uniform_falls(uniform: float, token: int, probability: float) -> None:
    assert draw(uniform) == (token, pytest.approx(probability, abs=1e-6))


def test_temperature_sharpens_and_the_logprob_follows() -> None:
    # At temperature 0.5 the weights are squares: 1, 16, 4, 9 of 30.
    assert draw(0.03, temperature=0.5) == (0, pytest.approx(1 / 30, abs=1e-6))
    assert draw(0.04, temperature=0.5) == (1, pytest.approx(16 / 30, abs=1e-6))


def test_temperature_zero_is_greedy_with_logprobs_of_temperature_one() -> None:
    assert draw(0.999, temperature=0.0) == (1, pytest.approx(0.4, abs=1e-6))


def test_top_k_draws_among_the_likeliest_with_the_whole_distributions_logprob() -> None:
    # Tokens 1 and 3 remain, 4 to 3.
    assert draw(0.57, top_k=2) == (1, pytest.approx(0.4, abs=1e-6))
    assert draw(0.58, top_k=2) == (3, pytest.approx(0.3, abs=1e-6))


def test_top_k_one_is_greedy() -> None:
    assert draw(0.999, top_k=1) == draw(0.999, temperature=0.0)


@pytest.mark.parametrize(("top_p", "nucleus"), [(0.01, {1}), (0.39, {1}), (0.41, {1, 3}), (0.71, {1, 2, 3})])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, nucleus: set[int]) -> None:
    drawn = {draw(uniform, top_p=top_p)[0] for uniform in np.linspace(0, 0.9999, 101)}
    assert drawn == nucleus


def test_top_k_and_top_p_both_bind() -> None:
    drawn = {draw(uniform, top_p=0.71, top_k=2)[0] for uniform in np.linspace(0, 0.9999, 101)}
    assert drawn == {1, 3}


def test_rows_have_their_own_settings() -> None:
    params = [SamplingParams(1), SamplingParams(1, temperature=0.0), SamplingParams(1, top_k=2)]
    uniforms = torch.full((3,), 0.999, dtype=torch.float64)
    tokens, _ = sample_tokens(LOGITS.expand(3, 4), uniforms, params)
    assert tokens.tolist() == [3, 1, 3]


def test_frequencies_are_the_probabilities() -> None:
    uniforms = uniform_stream(7, 40_000)
    tokens, _ = sample_tokens(LOGITS.expand(40_000, 4), uniforms, [SamplingParams(1)] * 40_000)
    assert (tokens.bincount() / 40_000).tolist() == pytest.approx([0.1, 0.4, 0.2, 0.3], abs=0.01)


def test_token_without_probability_is_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf]])
    for uniform in (0.0, 1 - 2**-53):
        tokens, _ = sample_tokens(logits, torch.tensor([uniform], dtype=torch.float64), [SamplingParams(1)])
        assert int(tokens) == 1


def test_stream_depends_on_the_seed_only() -> None:
    assert torch.equal(uniform_stream(3, 5), uniform_stream(3, 9)[:5])
    assert not torch.equal(uniform_stream(3, 5), uniform_stream(4, 5))
    assert uniform_stream(2**63 - 1, 2).dtype == torch.float64
