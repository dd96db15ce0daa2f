"""Logprobs of given tokens under logits, whose vocabulary may be split over ranks, without a copy of the logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# N rows of logits, R wanted ones, C a few of those; V this process's columns of the vocabulary, W ranks that share it
_CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Logits in full precision that live at one time: few enough for a CPU's cache, enough to keep a GPU busy."""


@dataclass(frozen=True, slots=True)
class SplitVocabulary:
    """A vocabulary whose columns lie on several ranks, in their order, and are padded to the same width on each."""

    size: int
    """Real columns over all ranks; the padding takes no part and gets no gradient."""
    group: dist.ProcessGroup


def token_logprobs(
    logits_NV: torch.Tensor,
    rows_R: torch.Tensor,
    token_ids_R: torch.Tensor,
    temperature: float,
    *,
    split: SplitVocabulary | None = None,
    with_entropy: bool = False,
    entropy_grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return logprobs_R and entropy_R in nats, of softmax(logits / temperature) over the whole vocabulary.

    Computed in float32 (float64 logits: in float64), a few rows at a time in both directions. The logits are neither
    copied nor changed; the backward pass allocates only their gradient. Ranks exchange one message, forwards only.

    Args:
        logits_NV: This process's columns.
        rows_R: int64, the rows that are wanted, each at most once; the others get no gradient and cost no time.
        token_ids_R: int64, the token each of them predicts.
        temperature: The one the tokens were sampled at, above 0.
        split: How the columns are spread over ranks; None: they are all here.
        with_entropy: Return the entropy of the whole distribution, else None.
        entropy_grad: Let gradients flow through the entropy, for an entropy bonus.
    """
    first = dist.get_rank(split.group) * logits_NV.shape[-1] if split else 0
    real = max(0, min(logits_NV.shape[-1], split.size - first)) if split else logits_NV.shape[-1]
    logprobs_R, entropy_R = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        logits_NV, rows_R, token_ids_R - first, temperature, real, split.group if split else None, with_entropy
    )
    if entropy_R is not None and not entropy_grad:
        entropy_R = entropy_R.detach()
    return logprobs_R, entropy_R


class _TokenLogprobs(torch.autograd.Function):
    """Keeps each rank's share of the probability and recomputes the rest; autograd would keep copies of the logits."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any,
        logits_NV: torch.Tensor,
        rows_R: torch.Tensor,
        columns_R: torch.Tensor,
        temperature: float,
        real: int,
        group: dist.ProcessGroup | None,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # Among the columns here: log of the sum of exp(logit), logprob of the token where it is here, and entropy.
        own_3R = logits_NV.new_zeros((3, len(rows_R)), dtype=_precision(logits_NV))
        for span in _spans(logits_NV, rows_R):
            log_probs_CV = _log_probs(logits_NV, rows_R[span], real, temperature)
            here_C, column_C = _held(columns_R[span], real)
            logprob_C = log_probs_CV.gather(-1, column_C[:, None])[:, 0]
            best_C = log_probs_CV.argmax(dim=-1)
            logit_C = logits_NV[rows_R[span], best_C].to(own_3R.dtype) / temperature
            own_3R[0, span] = logit_C - log_probs_CV.gather(-1, best_C[:, None])[:, 0]
            own_3R[1, span] = logprob_C.where(here_C, -torch.inf)
            if with_entropy:
                own_3R[2, span] = torch.special.entr(log_probs_CV.exp_()).sum(dim=-1)
        all_W3R = _over_ranks(own_3R, group)
        shares_WR = all_W3R[:, 0] - all_W3R[:, 0].logsumexp(dim=0)  # log of each rank's share of the probability
        logprobs_R = (all_W3R[:, 1] + shares_WR).amax(dim=0)
        entropy_R = (shares_WR.exp() * (all_W3R[:, 2] - shares_WR)).sum(dim=0) if with_entropy else None
        share_R = shares_WR[dist.get_rank(group) if group else 0]
        ctx.save_for_backward(logits_NV, rows_R, columns_R, share_R, entropy_R)
        ctx.temperature, ctx.real = temperature, real
        ctx.set_materialize_grads(False)
        return logprobs_R, entropy_R

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs_R: torch.Tensor | None, grad_entropy_R: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, None, None, None, None, None]:
        """d logprob / d z_j = [j is the token] - p_j; d entropy / d z_j = -p_j log p_j - p_j entropy."""
        logits_NV, rows_R, columns_R, share_R, entropy_R = ctx.saved_tensors
        pull_R = torch.zeros_like(share_R) if grad_logprobs_R is None else grad_logprobs_R / ctx.temperature
        grad_logits_NV = torch.zeros_like(logits_NV)
        for span in _spans(logits_NV, rows_R):
            log_probs_CV = _log_probs(logits_NV, rows_R[span], ctx.real, ctx.temperature)
            probs_CV = log_probs_CV.add_(share_R[span, None]).exp_()
            here_C, column_C = _held(columns_R[span], ctx.real)
            pull_C1 = pull_R[span, None]
            if grad_entropy_R is None:
                grad_CV = probs_CV.mul_(-pull_C1)
            else:
                entropy_pull_C1 = grad_entropy_R[span, None] / ctx.temperature
                grad_CV = torch.special.entr(probs_CV).mul_(entropy_pull_C1)
                grad_CV -= probs_CV.mul_(pull_C1 + entropy_R[span, None] * entropy_pull_C1)
            grad_CV.scatter_add_(-1, column_C[:, None], pull_C1.where(here_C[:, None], 0.0))
            grad_logits_NV[rows_R[span], : ctx.real] = grad_CV.to(grad_logits_NV.dtype)
        return grad_logits_NV, None, None, None, None, None, None


def _log_probs(logits_NV: torch.Tensor, rows_C: torch.Tensor, real: int, temperature: float) -> torch.Tensor:
    """Return log probabilities [C, real] among the columns here alone, in full precision."""
    precision = _precision(logits_NV)
    logits_CV = logits_NV[rows_C, :real]
    if temperature != 1:
        logits_CV = logits_CV.to(precision).div_(temperature)
    return logits_CV.log_softmax(dim=-1, dtype=precision)


def _held(columns_C: torch.Tensor, real: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which columns are here, and columns that exist here."""
    return (columns_C >= 0) & (columns_C < real), columns_C.clamp(0, real - 1)


def _over_ranks(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return all ranks' values, [W, ...]."""
    if group is None or dist.get_world_size(group) == 1:
        return values[None]
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, values, group=group)
    return torch.stack(parts)


def _precision(logits: torch.Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _spans(logits_NV: torch.Tensor, rows_R: torch.Tensor) -> Iterator[slice]:
    """Cut the wanted rows so that each cut's logits are few enough, or one row's."""
    step = max(1, _CHUNK_ELEMENTS[logits_NV.device.type] // logits_NV.shape[-1])
    for start in range(0, len(rows_R), step):
        yield slice(start, start + step)
