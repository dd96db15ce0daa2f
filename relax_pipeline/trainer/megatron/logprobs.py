"""Logprobs of given tokens under logits whose vocabulary is split over ranks, without a second copy of the logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

# S tokens, V this rank's columns of the vocabulary, C a few of the tokens
_CHUNK_TOKENS = 64
"""Tokens whose float32 logits live at one time."""


def token_logprobs(
    logits_SV: torch.Tensor,
    token_ids_S: torch.Tensor,
    temperature: float,
    *,
    vocabulary: int,
    group: dist.ProcessGroup,
    with_entropy: bool = False,
    entropy_grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return logprobs_S and entropy_S in nats, of softmax(logits / temperature) over the whole vocabulary.

    Float32, a few tokens at a time in both directions; two messages between the ranks, whatever the length. Columns
    beyond the vocabulary, which Megatron adds so that it divides by the ranks, take no part and get no gradient.

    Args:
        logits_SV: This rank's columns; neither copied nor changed.
        token_ids_S: int64.
        temperature: The one the tokens were sampled at, above 0.
        vocabulary: Real columns over all ranks.
        group: The ranks that share the vocabulary, in column order, alike in width.
        with_entropy: Return the entropy, else None.
        entropy_grad: Let gradients flow through the entropy.
    """
    first = dist.get_rank(group) * logits_SV.shape[-1]
    real = max(0, min(logits_SV.shape[-1], vocabulary - first))
    logprobs_S, entropy_S = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        logits_SV, token_ids_S - first, temperature, real, group, with_entropy
    )
    if entropy_S is not None and not entropy_grad:
        entropy_S = entropy_S.detach()
    return logprobs_S, entropy_S


class _TokenLogprobs(torch.autograd.Function):
    """Keeps log-normalisers [S] and recomputes probabilities in the backward pass."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any,
        logits_SV: torch.Tensor,
        columns_S: torch.Tensor,
        temperature: float,
        real: int,
        group: dist.ProcessGroup,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        largest_S = logits_SV[:, :real].amax(dim=-1).float() / temperature
        dist.all_reduce(largest_S, op=dist.ReduceOp.MAX, group=group)
        # Over this rank's columns: sum of exp, of exp times shifted logit, and the token's own shifted logit.
        sums_3S = logits_SV.new_zeros((3, len(columns_S)), dtype=torch.float32)
        for span in _spans(len(columns_S)):
            shifted_CV = logits_SV[span, :real].float() / temperature - largest_S[span, None]
            exponentials_CV = shifted_CV.exp()
            sums_3S[0, span] = exponentials_CV.sum(dim=-1)
            if with_entropy:
                sums_3S[1, span] = (exponentials_CV * shifted_CV).sum(dim=-1)
            here_C, chosen_C1 = _held(columns_S[span], real)
            sums_3S[2, span] = torch.where(here_C, shifted_CV.gather(-1, chosen_C1)[:, 0], 0.0)
        dist.all_reduce(sums_3S, group=group)
        log_sum_S = sums_3S[0].log()
        entropy_S = log_sum_S - sums_3S[1] / sums_3S[0] if with_entropy else None
        ctx.save_for_backward(logits_SV, columns_S, log_sum_S + largest_S, entropy_S)
        ctx.temperature, ctx.real = temperature, real
        ctx.set_materialize_grads(False)
        return sums_3S[2] - log_sum_S, entropy_S

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs_S: torch.Tensor | None, grad_entropy_S: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, None, None, None, None]:
        """d logprob / d z_j = [j is the token] - p_j; d entropy / d z_j = -p_j (log p_j + entropy)."""
        logits_SV, columns_S, normaliser_S, entropy_S = ctx.saved_tensors
        if grad_logprobs_S is None:
            grad_logprobs_S = torch.zeros_like(normaliser_S)
        grad_logits_SV = torch.zeros_like(logits_SV)
        for span in _spans(len(columns_S)):
            log_probs_CV = logits_SV[span, : ctx.real].float() / ctx.temperature - normaliser_S[span, None]
            probs_CV = log_probs_CV.exp()
            grad_CV = probs_CV * -grad_logprobs_S[span, None]
            here_C, chosen_C1 = _held(columns_S[span], ctx.real)
            grad_CV.scatter_add_(-1, chosen_C1, torch.where(here_C, grad_logprobs_S[span], 0.0)[:, None])
            if grad_entropy_S is not None:
                grad_CV -= probs_CV * (log_probs_CV + entropy_S[span, None]) * grad_entropy_S[span, None]
            grad_logits_SV[span, : ctx.real] = grad_CV.div_(ctx.temperature)
        return grad_logits_SV, None, None, None, None, None


def _held(columns_C: torch.Tensor, real: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tokens' columns this rank holds, and columns that exist here, [C, 1]."""
    here_C = (columns_C >= 0) & (columns_C < real)
    return here_C, columns_C.clamp(0, real - 1)[:, None]


def _spans(length: int) -> Iterator[slice]:
    for start in range(0, length, _CHUNK_TOKENS):
        yield slice(start, start + _CHUNK_TOKENS)
