"""Draw tokens from logits with a random stream of each sequence's own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from relax_pipeline.types import SamplingParams

# B sequences, V vocabulary


def uniform_stream(seed: int, length: int) -> torch.Tensor:
    """Return [length] uniforms in [0, 1) that depend on the seed only, so batching never changes a draw."""
    return torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).random(length))


def sample_tokens(
    logits_BV: torch.Tensor, uniforms_B: torch.Tensor, params: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token a row.

    Args:
        logits_BV: Raw logits.
        uniforms_B: One uniform in [0, 1) a row, float64.
        params: One a row.

    Returns:
        token_ids_B, and logprobs_B of the whole distribution at the row's temperature, before top-p and top-k.
        A row of temperature 0 is greedy and has the logprobs of temperature 1.
    """
    temperatures_B = torch.tensor([p.temperature for p in params], device=logits_BV.device)
    greedy_B = temperatures_B == 0
    scaled_BV = logits_BV.float() / torch.where(greedy_B, 1.0, temperatures_B)[:, None]
    logprobs_BV = torch.log_softmax(scaled_BV, dim=-1)
    allowed_BV = logprobs_BV
    if any(p.top_k or p.top_p < 1 for p in params):
        allowed_BV = _truncate(logprobs_BV, params)
    cumulative_BV = allowed_BV.double().exp().cumsum(dim=-1)
    targets_B1 = uniforms_B.to(cumulative_BV.device)[:, None] * cumulative_BV[:, -1:]
    drawn_B = torch.searchsorted(cumulative_BV, targets_B1, right=True)[:, 0].clamp(max=logits_BV.shape[-1] - 1)
    tokens_B = torch.where(greedy_B, logits_BV.argmax(dim=-1), drawn_B)
    return tokens_B, logprobs_BV.gather(-1, tokens_B[:, None])[:, 0]


def _truncate(logprobs_BV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Set to -inf what lies outside each row's top-k and top-p; the likeliest token always stays."""
    device, vocabulary = logprobs_BV.device, logprobs_BV.shape[-1]
    sorted_BV, order_BV = logprobs_BV.sort(dim=-1, descending=True)
    mass_before_BV = sorted_BV.exp().cumsum(dim=-1) - sorted_BV.exp()
    top_p_B1 = torch.tensor([[p.top_p] for p in params], device=device)
    top_k_B1 = torch.tensor([[p.top_k or vocabulary] for p in params], device=device)
    keep_BV = (mass_before_BV < top_p_B1) & (torch.arange(vocabulary, device=device) < top_k_B1)
    kept_BV = torch.where(keep_BV, sorted_BV, -torch.inf)
    return torch.empty_like(kept_BV).scatter(-1, order_BV, kept_BV)
