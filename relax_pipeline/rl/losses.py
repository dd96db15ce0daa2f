"""Per-token policy losses, importance weights against the engine, and KL estimators. Pure functions of logprobs."""

from __future__ import annotations

from typing import Literal

import torch

# B sequences, T completion tokens
_MAX_LOG_RATIO = 20.0


def clip_loss(
    log_ratio_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss_BT = max(-A r, -A clip(r, 1 - low, 1 + high)) and which tokens were clipped, so have no gradient.

    dual_clip bounds the loss of tokens with a negative advantage at -A * dual_clip.

    Sources: Schulman et al. 2017 (PPO), arXiv:1707.06347, equation 7; two bounds: Yu et al. 2025 (DAPO),
    arXiv:2503.14476, section 3.1; dual clip: Ye et al. 2020, arXiv:1912.09729.
    """
    advantages_B1 = advantages_B[:, None]
    ratio_BT = ratio(log_ratio_BT)
    free_BT = -advantages_B1 * ratio_BT
    bounded_BT = -advantages_B1 * ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    loss_BT, clipped_BT = torch.maximum(free_BT, bounded_BT), bounded_BT > free_BT
    if dual_clip is not None:
        ceiling_B1 = torch.where(advantages_B1 < 0, -advantages_B1 * dual_clip, torch.inf)
        clipped_BT = clipped_BT | (loss_BT > ceiling_B1)
        loss_BT = torch.minimum(loss_BT, ceiling_B1)
    return loss_BT, clipped_BT


def gspo_loss(
    log_ratio_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return clip_loss of the sequence ratio exp(mean over tokens of the log ratio), and the clipped tokens.

    Each token carries the sequence's value and its own gradient (GSPO-token), so that token weights act on tokens.
    The ratio is length-normalised and stays near 1: the paper clips at 3e-4 and 4e-4.

    Source: Zheng et al. 2025 (GSPO), arXiv:2507.18071, sections 4.1 and 4.3.
    """
    log_ratio_B1 = _sequence_mean(log_ratio_BT.detach(), mask_BT)
    sequence_BT = log_ratio_B1 + (log_ratio_BT - log_ratio_BT.detach())
    return clip_loss(sequence_BT, advantages_B, clip_low=clip_low, clip_high=clip_high)


def cispo_loss(
    policy_logprobs_BT: torch.Tensor,
    log_ratio_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss_BT = -stop_gradient(clip(r)) A logprob, and the tokens whose weight was clipped.

    Clipped tokens keep a gradient, unlike under clip_loss.

    Source: MiniMax 2025 (CISPO), arXiv:2506.13585, section 3.
    """
    ratio_BT = ratio(log_ratio_BT).detach()
    weight_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    return -weight_BT * advantages_B[:, None] * policy_logprobs_BT, weight_BT != ratio_BT


def importance_weights(
    old_minus_rollout_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    kind: Literal["off", "token_truncate", "sequence_mask"],
    cap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return detached weights_BT that correct for the engine's logprobs differing from the trainer's, and what it cut.

    off: 1.
    token_truncate: min(exp(d), cap), each token by itself.
    sequence_mask: 1 for a sequence whose exp(mean of d over its tokens) lies in [1 / cap, cap], else 0. The mean is
    of tokens in mask_BT; a product over tokens would grow with the length and drop every long completion.

    Sources: truncation: Ionides 2008, and Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy
    RL training"; dropping sequences by their geometric mean: own choice, with the ratio of GSPO.

    Args:
        old_minus_rollout_BT: d, logprobs of the trainer's policy at the start of the step minus the engine's.
        mask_BT: bool, tokens that train.
        kind: One of the above.
        cap: Above 1.
    """
    difference_BT = old_minus_rollout_BT.detach()
    ones_BT = torch.ones_like(difference_BT)
    match kind:
        case "off":
            return ones_BT, torch.zeros_like(mask_BT)
        case "token_truncate":
            ratio_BT = ratio(difference_BT)
            return ratio_BT.clamp(max=cap), ratio_BT > cap
        case "sequence_mask":
            mean_ratio_B1 = ratio(_sequence_mean(difference_BT, mask_BT))
            dropped_BT = ((mean_ratio_B1 > cap) | (mean_ratio_B1 < 1 / cap)).expand_as(mask_BT)
            return ones_BT.masked_fill(dropped_BT, 0.0), dropped_BT


def kl(
    policy_logprobs_BT: torch.Tensor, ref_logprobs_BT: torch.Tensor, kind: Literal["k1", "k2", "k3"]
) -> torch.Tensor:
    """Estimate KL(policy || reference) at each token sampled from the policy, with d = policy - reference.

    k1 = d: unbiased, high variance. As a loss its expected gradient is 0, so it is a metric only.
    k2 = d² / 2: biased, low variance; as a loss its expected gradient is that of KL(policy || reference).
    k3 = exp(-d) - 1 + d: unbiased, never negative; as a loss its gradient is that of KL(reference || policy).

    Source: Schulman 2020, "Approximating KL Divergence", joschu.net/blog/kl-approx.html.
    """
    difference_BT = policy_logprobs_BT - ref_logprobs_BT
    match kind:
        case "k1":
            return difference_BT
        case "k2":
            return difference_BT.square() / 2
        case "k3":
            # expm1 keeps the digits that exp(-d) - 1 loses where d is small.
            return (-difference_BT).clamp(max=_MAX_LOG_RATIO).expm1() + difference_BT


def ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp(log_ratio), kept finite: far outside every clip range, an infinity would turn gradients into NaN."""
    return log_ratio.clamp(max=_MAX_LOG_RATIO).exp()


def _sequence_mean(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Mean over the masked-in tokens of each row, [B, 1]; 0 for a row without any."""
    total_B1 = values_BT.masked_fill(~mask_BT, 0.0).sum(dim=-1, keepdim=True)
    return total_B1 / mask_BT.sum(dim=-1, keepdim=True).clamp(min=1)
