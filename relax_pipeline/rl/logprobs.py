"""Logprobs of given tokens under logits, without a second copy of the logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

# B sequences, T tokens, V vocabulary
_CHUNK_TOKENS = 64
"""Tokens whose float32 logits live at one time, about: 37 MiB a copy at a vocabulary of 152k."""


def token_logprobs(
    logits_BTV: torch.Tensor,
    token_ids_BT: torch.Tensor,
    temperature: float,
    *,
    with_entropy: bool = False,
    entropy_grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return logprobs_BT and entropy_BT in nats, of softmax(logits / temperature).

    Computed in float32 (float64 logits: in float64), a few tokens at a time in both directions. The logits are
    neither copied nor changed; the backward pass allocates only their gradient.

    Args:
        logits_BTV: Logits that predict the tokens, i.e. already shifted; any strides.
        token_ids_BT: int64.
        temperature: The one the tokens were sampled at, above 0.
        with_entropy: Return the entropy of the whole distribution, else None.
        entropy_grad: Let gradients flow through the entropy, for an entropy bonus.
    """
    logprobs_BT, entropy_BT = _TokenLogprobs.apply(logits_BTV, token_ids_BT, temperature, with_entropy)  # type: ignore[no-untyped-call]
    if entropy_BT is not None and not entropy_grad:
        entropy_BT = entropy_BT.detach()
    return logprobs_BT, entropy_BT


class _TokenLogprobs(torch.autograd.Function):
    """Keeps log-normalisers [B, T] and recomputes probabilities; autograd would keep float32 copies of the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits_BTV: torch.Tensor, token_ids_BT: torch.Tensor, temperature: float, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logprobs_BT = logits_BTV.new_empty(token_ids_BT.shape, dtype=_precision(logits_BTV))
        normaliser_BT = torch.empty_like(logprobs_BT)
        entropy_BT = torch.empty_like(logprobs_BT) if with_entropy else None
        for span in _spans(token_ids_BT):
            scaled_BCV = logits_BTV[:, span].to(logprobs_BT.dtype) / temperature
            normaliser_BC1 = scaled_BCV.logsumexp(dim=-1, keepdim=True)
            chosen_BC1 = scaled_BCV.gather(-1, token_ids_BT[:, span, None])
            logprobs_BT[:, span] = (chosen_BC1 - normaliser_BC1)[..., 0]
            normaliser_BT[:, span] = normaliser_BC1[..., 0]
            if entropy_BT is not None:
                entropy_BT[:, span] = torch.special.entr(scaled_BCV.sub_(normaliser_BC1).exp_()).sum(dim=-1)
        ctx.save_for_backward(logits_BTV, token_ids_BT, normaliser_BT, entropy_BT)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs_BT, entropy_BT

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs_BT: torch.Tensor | None, grad_entropy_BT: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, None, None]:
        """d logprob / d z_j = [j is the token] - p_j; d entropy / d z_j = -p_j log p_j - p_j entropy."""
        logits_BTV, token_ids_BT, normaliser_BT, entropy_BT = ctx.saved_tensors
        if grad_logprobs_BT is None:
            grad_logprobs_BT = torch.zeros_like(normaliser_BT)
        grad_logits_BTV = torch.empty_like(logits_BTV)
        for span in _spans(token_ids_BT):
            scaled_BCV = logits_BTV[:, span].to(normaliser_BT.dtype) / ctx.temperature
            probs_BCV = scaled_BCV.sub_(normaliser_BT[:, span, None]).exp_()
            grad_BC1 = grad_logprobs_BT[:, span, None]
            grad_BCV = (probs_BCV * -grad_BC1).scatter_add_(-1, token_ids_BT[:, span, None], grad_BC1)
            if grad_entropy_BT is not None:
                entropy_term_BCV = torch.special.entr(probs_BCV) - probs_BCV * entropy_BT[:, span, None]
                grad_BCV += entropy_term_BCV * grad_entropy_BT[:, span, None]
            grad_logits_BTV[:, span] = grad_BCV.div_(ctx.temperature)
        return grad_logits_BTV, None, None, None


def _precision(logits: torch.Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _spans(token_ids_BT: torch.Tensor) -> Iterator[slice]:
    """Cut T so that each cut, over all rows, holds at most _CHUNK_TOKENS tokens, or one column."""
    rows, length = token_ids_BT.shape
    step = max(1, _CHUNK_TOKENS // max(1, rows))
    for start in range(0, length, step):
        yield slice(start, start + step)
