"""The training objective of one micro-batch, and its metrics, so that micro-batches and ranks add up exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from relax_pipeline.config.algorithm import AlgorithmConfig
from relax_pipeline.rl.losses import cispo_loss, clip_loss, gspo_loss, importance_weights, kl, ratio

# B sequences, T completion tokens


@dataclass(frozen=True, slots=True)
class ObjectiveMetrics:
    """Scalars of one micro-batch, float64. Add micro-batches with `+`; all-reduce sums by SUM and maxima by MAX."""

    sums: dict[str, torch.Tensor]
    maxima: dict[str, torch.Tensor]

    def __add__(self, other: ObjectiveMetrics) -> ObjectiveMetrics:
        """Both micro-batches together."""
        return ObjectiveMetrics(
            sums={name: value + other.sums[name] for name, value in self.sums.items()},
            maxima={name: torch.maximum(value, other.maxima[name]) for name, value in self.maxima.items()},
        )


def objective(
    *,
    policy_logprobs_BT: torch.Tensor,
    old_logprobs_BT: torch.Tensor | None,
    rollout_logprobs_BT: torch.Tensor,
    ref_logprobs_BT: torch.Tensor | None,
    entropy_BT: torch.Tensor | None,
    advantages_B: torch.Tensor,
    mask_BT: torch.Tensor,
    config: AlgorithmConfig,
    token_total: float,
    sequence_total: float,
) -> tuple[torch.Tensor, ObjectiveMetrics]:
    """Return this micro-batch's share of the step's loss, float64, and its metrics. Shares of all ranks add up.

    A row without trained tokens contributes nothing. What lies outside mask_BT is never used, not even a NaN.

    Args:
        policy_logprobs_BT: Under the policy being trained, with gradient.
        old_logprobs_BT: Under the policy at the start of the step; None: the same as policy, so the ratio is 1.
        rollout_logprobs_BT: The engine's.
        ref_logprobs_BT: Under the base; needed where config.kl_coef > 0.
        entropy_BT: Of the policy; needed, with gradient, where config.entropy_coef > 0.
        advantages_B: One a sequence.
        mask_BT: bool, tokens that train.
        config: Which loss, clip range, correction and regularisers.
        token_total: Trained tokens of the whole optimizer step, over all micro-batches and ranks.
        sequence_total: Sequences of the same with at least one trained token.

    Raises:
        ValueError: A total is not positive, or a regulariser is on and its input is missing.
    """
    policy_BT, rollout_BT = _zeroed(policy_logprobs_BT, mask_BT), _zeroed(rollout_logprobs_BT, mask_BT)
    old_BT = policy_BT.detach() if old_logprobs_BT is None else _zeroed(old_logprobs_BT, mask_BT)
    weights_BT, capped_BT = importance_weights(
        old_BT - rollout_BT, mask_BT, config.importance_sampling, config.importance_cap
    )
    loss_BT, clipped_BT = _policy_loss(policy_BT, policy_BT - old_BT, advantages_B, mask_BT, config)
    loss_BT = weights_BT * loss_BT
    per_token = {"clip_share": clipped_BT, "importance_capped_share": capped_BT}
    for name, coef, value_BT in _regularisers(policy_BT, ref_logprobs_BT, entropy_BT, mask_BT, config):
        loss_BT = loss_BT + coef * value_BT
        per_token[name] = value_BT
    loss = (loss_BT * _token_shares(mask_BT, config, token_total, sequence_total)).sum()
    per_token |= _off_policy(policy_BT.detach(), old_BT, rollout_BT, weights_BT)
    return loss, _measure(loss, per_token, mask_BT)


def finalize_metrics(sums: Mapping[str, torch.Tensor], maxima: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Turn the sums and maxima of a whole step into what is plotted.

    Returns:
        loss; tokens trained; means over them of ratio, clipped share, |policy - rollout| logprob, KL(rollout || policy)
        (k3), importance-capped share, and where they were computed kl_ref and entropy; maxima of ratio and difference;
        ess, the effective sample size of the importance weights as a share of the tokens, (Σw)² / (n Σw²), Kong 1992.
    """
    totals = {name: float(value) for name, value in sums.items()}
    loss, tokens = totals.pop("loss"), totals.pop("tokens")
    ratio_total = totals.pop("ratio")
    weight, weight_squared = totals.pop("weight"), totals.pop("weight_squared")
    return {
        "loss": loss,
        "tokens": tokens,
        "ratio_mean": ratio_total / tokens,
        # All weights are 0 where sequence_mask dropped every sequence.
        "ess": weight**2 / (tokens * weight_squared) if weight_squared else 0.0,
        **{name: total / tokens for name, total in totals.items()},
        **{name: float(value) for name, value in maxima.items()},
    }


def _policy_loss(
    policy_BT: torch.Tensor,
    log_ratio_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    mask_BT: torch.Tensor,
    config: AlgorithmConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = config.clip_low, config.clip_high
    match config.loss:
        case "clip":
            return clip_loss(log_ratio_BT, advantages_B, clip_low=low, clip_high=high, dual_clip=config.dual_clip)
        case "gspo":
            return gspo_loss(log_ratio_BT, advantages_B, mask_BT, clip_low=low, clip_high=high)
        case "cispo":
            return cispo_loss(policy_BT, log_ratio_BT, advantages_B, clip_low=low, clip_high=high)


def _regularisers(
    policy_BT: torch.Tensor,
    ref_logprobs_BT: torch.Tensor | None,
    entropy_BT: torch.Tensor | None,
    mask_BT: torch.Tensor,
    config: AlgorithmConfig,
) -> Iterator[tuple[str, float, torch.Tensor]]:
    """Yield the name, the weight in the loss and the value of each whose input is there."""
    if ref_logprobs_BT is not None:
        yield "kl_ref", config.kl_coef, kl(policy_BT, _zeroed(ref_logprobs_BT, mask_BT), config.kl_kind)
    elif config.kl_coef > 0:
        raise ValueError(f"kl_coef is {config.kl_coef:g} and ref_logprobs are missing; compute them or set it to 0")
    if entropy_BT is not None:
        yield "entropy", -config.entropy_coef, _zeroed(entropy_BT, mask_BT)
    elif config.entropy_coef > 0:
        raise ValueError(f"entropy_coef is {config.entropy_coef:g} without an entropy; compute it or set it to 0")


def _token_shares(
    mask_BT: torch.Tensor, config: AlgorithmConfig, token_total: float, sequence_total: float
) -> torch.Tensor:
    """How much each token counts: alike over the step, or alike within a sequence and sequences alike."""
    if token_total <= 0 or sequence_total <= 0:
        raise ValueError(
            f"the step has {token_total:g} trained tokens in {sequence_total:g} sequences; there is nothing to "
            "train on: leave the optimizer step out"
        )
    if config.aggregation == "token":
        return mask_BT.double() / token_total
    return mask_BT.double() / mask_BT.sum(dim=-1, keepdim=True).clamp(min=1) / sequence_total


def _off_policy(
    policy_BT: torch.Tensor, old_BT: torch.Tensor, rollout_BT: torch.Tensor, weights_BT: torch.Tensor
) -> dict[str, torch.Tensor]:
    """How far policy, old policy and engine are apart, token by token."""
    return {
        "ratio": ratio(policy_BT - old_BT),
        "rollout_logprob_abs_diff": (policy_BT - rollout_BT).abs(),
        "rollout_kl": kl(rollout_BT, policy_BT, "k3"),
        "weight": weights_BT,
        "weight_squared": weights_BT.square(),
    }


def _measure(loss: torch.Tensor, per_token: dict[str, torch.Tensor], mask_BT: torch.Tensor) -> ObjectiveMetrics:
    values = {name: _zeroed(value_BT.detach(), mask_BT).double() for name, value_BT in per_token.items()}
    return ObjectiveMetrics(
        sums={"loss": loss.detach(), "tokens": mask_BT.sum().double()}
        | {name: value_BT.sum() for name, value_BT in values.items()},
        maxima={f"{name}_max": values[name].max() for name in ("ratio", "rollout_logprob_abs_diff")},
    )


def _zeroed(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """0 outside the mask, so that nothing there reaches a loss or a gradient."""
    return values_BT.masked_fill(~mask_BT, 0)
