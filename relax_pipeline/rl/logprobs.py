"""Logprobs of given tokens under logits, whose vocabulary may be split over ranks, without a copy of the logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from relax_pipeline.fused import fused

# N rows of logits, R wanted ones, C a few of those; V this process's columns of the vocabulary, W ranks that share it
_CHUNK_ELEMENTS = {"cpu": 1 << 22}
"""Logits in full precision that live at one time: few enough for a CPU's cache. A GPU's kernels write none of them."""
_IMPOSSIBLE = -1e4
"""Stands for the logarithm of 0: its exponential is 0, and so is the product of both."""


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

    Computed in float32 (float64 logits: in float64), on a CPU a few rows at a time, on a GPU by a kernel that writes
    none of it to memory. The logits are neither copied nor changed; the backward pass allocates only their gradient.
    Ranks exchange one message, forwards only.

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
    """Keeps the log of the sum of exp(logit) and recomputes the rest; autograd would keep copies of the logits."""

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
        temperature_ = logits_NV.new_full((), temperature, dtype=_precision(logits_NV))
        # Among the columns here: log of the sum of exp(logit), logprob of the token where it is here, and entropy.
        own_3R = logits_NV.new_zeros((3, len(rows_R)), dtype=_precision(logits_NV))
        for span in _spans(logits_NV, rows_R):
            best_C, log_sum_C, own_3R[2, span] = sums(logits_NV[:, :real], rows_R[span], temperature_)
            own_3R[0, span] = best_C + log_sum_C
            here_C, column_C = _held(columns_R[span], real)
            logit_C = logits_NV[rows_R[span], column_C].to(own_3R.dtype) / temperature_
            own_3R[1, span] = (logit_C - best_C - log_sum_C).where(here_C, -torch.inf)
        all_W3R = _over_ranks(own_3R, group)
        total_R = all_W3R[:, 0].logsumexp(dim=0)
        shares_WR = all_W3R[:, 0] - total_R  # log of each rank's share of the probability
        logprobs_R = (all_W3R[:, 1] + shares_WR).amax(dim=0)
        entropy_R = (shares_WR.exp() * (all_W3R[:, 2] - shares_WR)).sum(dim=0) if with_entropy else None
        ctx.save_for_backward(logits_NV, rows_R, columns_R, total_R, entropy_R, temperature_)
        ctx.real = real
        ctx.set_materialize_grads(False)
        return logprobs_R, entropy_R

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs_R: torch.Tensor | None, grad_entropy_R: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, None, None, None, None, None]:
        """d logprob / d z_j = [j is the token] - p_j; d entropy / d z_j = -p_j log p_j - p_j entropy."""
        logits_NV, rows_R, columns_R, total_R, entropy_R, temperature = ctx.saved_tensors
        zeros_R = torch.zeros_like(total_R)
        pull_R = zeros_R if grad_logprobs_R is None else grad_logprobs_R / temperature
        entropy_pull_R = zeros_R if grad_entropy_R is None else grad_entropy_R / temperature
        shared_pull_R = pull_R if grad_entropy_R is None else pull_R + entropy_R * entropy_pull_R
        grad_logits_NV = torch.zeros_like(logits_NV)
        logits_NV, grad_NV = logits_NV[:, : ctx.real], grad_logits_NV[:, : ctx.real]
        for span in _spans(logits_NV, rows_R):
            rows_C, (here_C, column_C) = rows_R[span], _held(columns_R[span], ctx.real)
            factors = total_R[span, None], shared_pull_R[span, None], entropy_pull_R[span, None]
            write_gradients(grad_NV, logits_NV, rows_C, temperature, *factors)
            token_C1 = gradients(logits_NV[rows_C, column_C][:, None], temperature, *factors)
            grad_NV[rows_C, column_C] = (token_C1[:, 0] + pull_R[span].where(here_C, 0)).to(grad_NV.dtype)
        return grad_logits_NV, None, None, None, None, None, None


@fused
def sums(
    logits_NV: torch.Tensor, rows_C: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return of each row the largest of z = logits / temperature, log(sum(exp(z - largest))), and the entropy.

    Args:
        logits_NV: Columns that take part.
        rows_C: Rows that are wanted.
        temperature: 0-D, of the precision to compute in.
    """
    z_CV = logits_NV[rows_C].to(temperature.dtype).div_(temperature)
    best_C = z_CV.amax(dim=-1)
    z_CV.sub_(best_C[:, None]).clamp_(min=_IMPOSSIBLE)
    weights_CV = z_CV.exp()
    sum_C = weights_CV.sum(dim=-1)
    log_sum_C = sum_C.log()
    return best_C, log_sum_C, log_sum_C - weights_CV.mul_(z_CV).sum(dim=-1) / sum_C


@fused
def write_gradients(
    grad_NV: torch.Tensor, logits_NV: torch.Tensor, rows_C: torch.Tensor, *factors: torch.Tensor
) -> None:
    """Fill in these rows what `gradients` returns of the logits' rows."""
    grad_NV[rows_C] = gradients(logits_NV[rows_C], *factors).to(grad_NV.dtype)


def gradients(
    logits_CV: torch.Tensor,
    temperature: torch.Tensor,
    total_C1: torch.Tensor,
    pull_C1: torch.Tensor,
    entropy_pull_C1: torch.Tensor,
) -> torch.Tensor:
    """Return -p (pull + entropy_pull log p), where log p = logits / temperature - total."""
    log_probs_CV = (logits_CV.to(temperature.dtype) / temperature).sub_(total_C1).clamp_(min=_IMPOSSIBLE)
    return torch.addcmul(pull_C1, entropy_pull_C1, log_probs_CV).mul_(log_probs_CV.exp_()).neg_()


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
    elements = _CHUNK_ELEMENTS.get(logits_NV.device.type, logits_NV.numel())
    step = max(1, elements // logits_NV.shape[-1])
    for start in range(0, len(rows_R), step):
        yield slice(start, start + step)
