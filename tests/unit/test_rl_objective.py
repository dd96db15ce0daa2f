from __future__ import annotations

import itertools
import math

import pytest
import torch

from relax_pipeline.config.algorithm import AlgorithmConfig
from relax_pipeline.rl.objective import finalize_metrics, objective

MASK = torch.tensor(
    [[True] * 5, [False, True, False, False, False], [False] * 5, [True, False, True, True, False]]
)  # 9 tokens in 3 sequences, one row without any
TOKENS, SEQUENCES = 9, 3
EVERYTHING = {"kl_coef": 0.3, "entropy_coef": 0.2}


def inputs(spread: float = 0.5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)

    def noise() -> torch.Tensor:
        return torch.randn(4, 5, generator=generator, dtype=torch.float64)

    policy = -noise().abs() - 0.1
    return {
        "policy_logprobs_BT": policy,
        "old_logprobs_BT": policy + spread * noise(),
        "rollout_logprobs_BT": policy + spread * noise(),
        "ref_logprobs_BT": policy + spread * noise(),
        "entropy_BT": noise().abs(),
        "advantages_B": torch.tensor([1.0, -0.5, 2.0, -1.5], dtype=torch.float64),
        "mask_BT": MASK,
    }


def run(tensors: dict[str, torch.Tensor], config: AlgorithmConfig):
    """Objective, its metrics, and the gradients of policy_logprobs and entropy."""
    policy, entropy = (tensors[name].clone().requires_grad_() for name in ("policy_logprobs_BT", "entropy_BT"))
    loss, metrics = objective(
        **(tensors | {"policy_logprobs_BT": policy, "entropy_BT": entropy}),
        config=config,
        token_total=TOKENS,
        sequence_total=SEQUENCES,
    )
    loss.backward()
    return loss.detach(), metrics, policy.grad, entropy.grad


def by_loops(tensors: dict[str, torch.Tensor], config: AlgorithmConfig) -> tuple[float, list[list[float]]]:
    """Loss and its derivative by each policy logprob, one token at a time."""
    policy, old, rollout, ref, entropy, advantages, mask = (value.tolist() for value in tensors.values())
    low, high = 1 - config.clip_low, 1 + config.clip_high
    loss, gradient = 0.0, [[0.0] * 5 for _ in range(4)]
    for b in range(4):
        trained = [t for t in range(5) if mask[b][t]]
        for t in trained:
            ratio = math.exp(policy[b][t] - old[b][t])
            if config.loss == "gspo":
                ratio = math.exp(sum(policy[b][i] - old[b][i] for i in trained) / len(trained))
            bounded = min(max(ratio, low), high)
            if config.loss == "cispo":
                value, slope = -bounded * advantages[b] * policy[b][t], -bounded * advantages[b]
            elif ratio * advantages[b] <= bounded * advantages[b]:
                value = slope = -ratio * advantages[b]
            else:
                value, slope = -bounded * advantages[b], 0.0
            if config.dual_clip is not None and advantages[b] < 0 and value > -config.dual_clip * advantages[b]:
                value, slope = -config.dual_clip * advantages[b], 0.0

            weight = 1.0
            if config.importance_sampling == "token_truncate":
                weight = min(math.exp(old[b][t] - rollout[b][t]), config.importance_cap)
            elif config.importance_sampling == "sequence_mask":
                mean = math.exp(sum(old[b][i] - rollout[b][i] for i in trained) / len(trained))
                weight = 1.0 if 1 / config.importance_cap <= mean <= config.importance_cap else 0.0

            d = policy[b][t] - ref[b][t]
            kl, kl_slope = {
                "k1": (d, 1.0),
                "k2": (d * d / 2, d),
                "k3": (math.exp(-d) - 1 + d, 1 - math.exp(-d)),
            }[config.kl_kind]
            share = 1 / TOKENS if config.aggregation == "token" else 1 / len(trained) / SEQUENCES
            loss += share * (weight * value + config.kl_coef * kl - config.entropy_coef * entropy[b][t])
            gradient[b][t] = share * (weight * slope + config.kl_coef * kl_slope)
    return loss, gradient


GRID = [
    AlgorithmConfig(loss=loss, aggregation=aggregation, importance_sampling=correction, kl_kind=kl_kind, **EVERYTHING)
    for loss, aggregation, correction, kl_kind in itertools.product(
        ["clip", "gspo", "cispo"],
        ["token", "sequence"],
        ["off", "token_truncate", "sequence_mask"],
        ["k1", "k2", "k3"],
    )
] + [AlgorithmConfig(dual_clip=1.5), AlgorithmConfig(importance_sampling="sequence_mask", importance_cap=1.05)]


@pytest.mark.parametrize("config", GRID, ids=str)
def test_loss_and_gradient_agree_with_loops(config):
    tensors = inputs()
    loss, _, gradient, _ = run(tensors, config)
    expected_loss, expected_gradient = by_loops(tensors, config)
    assert loss.item() == pytest.approx(expected_loss, abs=1e-13)
    torch.testing.assert_close(gradient, torch.tensor(expected_gradient, dtype=torch.float64), rtol=0, atol=1e-13)


@pytest.mark.parametrize("config", GRID[::4], ids=str)
def test_micro_batches_add_up_to_the_whole(config):
    tensors = inputs()
    whole_loss, whole_metrics, whole_gradient, _ = run(tensors, config)
    parts = [run({name: value[rows] for name, value in tensors.items()}, config) for rows in ([2], [0, 3], [1])]
    gradient = torch.cat([part[2] for part in parts])[[1, 3, 0, 2]]
    metrics = parts[0][1] + parts[1][1] + parts[2][1]
    torch.testing.assert_close(sum(part[0] for part in parts), whole_loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, whole_gradient, rtol=0, atol=1e-12)
    assert finalize_metrics(metrics.sums, metrics.maxima) == pytest.approx(
        finalize_metrics(whole_metrics.sums, whole_metrics.maxima), abs=1e-12
    )


def test_without_old_logprobs_the_gradient_is_reinforce():
    tensors = inputs() | {"old_logprobs_BT": None}
    _, metrics, gradient, _ = run(tensors, AlgorithmConfig(importance_sampling="off"))
    torch.testing.assert_close(gradient, -tensors["advantages_B"][:, None] * MASK / TOKENS, rtol=0, atol=1e-16)
    assert metrics.maxima["ratio_max"].item() == 1.0


@pytest.mark.parametrize("loss", ["clip", "gspo", "cispo"])
def test_all_losses_have_one_gradient_where_the_ratio_is_one(loss):
    tensors = inputs() | {"old_logprobs_BT": None}
    _, _, gradient, _ = run(tensors, AlgorithmConfig(loss=loss))
    _, _, expected, _ = run(tensors, AlgorithmConfig(loss="clip"))
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-16)


def test_entropy_bonus_pulls_entropy_up():
    _, _, _, gradient = run(inputs(), AlgorithmConfig(entropy_coef=0.2))
    torch.testing.assert_close(gradient, -0.2 * MASK.double() / TOKENS, rtol=0, atol=1e-16)


def test_what_lies_outside_the_mask_is_never_used():
    tensors = inputs()
    spoiled = {
        name: value.masked_fill(~MASK, torch.nan) if value.shape == MASK.shape and value.is_floating_point() else value
        for name, value in tensors.items()
    }
    config = AlgorithmConfig(**EVERYTHING)
    loss, metrics, gradient, _ = run(spoiled, config)
    expected_loss, expected_metrics, expected_gradient, _ = run(tensors, config)
    assert loss == expected_loss
    assert torch.equal(gradient, expected_gradient)
    assert metrics == expected_metrics


def test_metrics_by_hand():
    ratios, mismatches = [2.0, 1.0, 0.5, 77.0], [4.0, 1.0, 0.5, 77.0]
    old = torch.full((1, 4), -1.0, dtype=torch.float64)
    _, metrics = objective(
        policy_logprobs_BT=old + torch.tensor([ratios], dtype=torch.float64).log(),
        old_logprobs_BT=old,
        rollout_logprobs_BT=old - torch.tensor([mismatches], dtype=torch.float64).log(),
        ref_logprobs_BT=None,
        entropy_BT=None,
        advantages_B=torch.tensor([1.0]),
        mask_BT=torch.tensor([[True, True, True, False]]),
        config=AlgorithmConfig(),
        token_total=3,
        sequence_total=1,
    )
    # Weights 2 (capped from 4), 1 and 0.5; losses -1.28 (clipped), -1 and -0.5; policy - rollout log 8, 0 and -log 4.
    assert finalize_metrics(metrics.sums, metrics.maxima) == pytest.approx(
        {
            "loss": -(2 * 1.28 + 1 + 0.25) / 3,
            "tokens": 3,
            "ratio_mean": 3.5 / 3,
            "ratio_max": 2.0,
            "clip_share": 1 / 3,
            "importance_capped_share": 1 / 3,
            "rollout_logprob_abs_diff": (math.log(8) + math.log(4)) / 3,
            "rollout_logprob_abs_diff_max": math.log(8),
            "rollout_kl": ((8 - 1 - math.log(8)) + (0.25 - 1 + math.log(4))) / 3,
            "ess": 3.5**2 / (3 * (4 + 1 + 0.25)),
        },
        abs=1e-14,
    )


def test_kl_and_entropy_are_reported_where_they_are_computed():
    tensors = inputs()
    _, metrics, _, _ = run(tensors, AlgorithmConfig(kl_kind="k1"))
    found = finalize_metrics(metrics.sums, metrics.maxima)
    assert found["kl_ref"] == pytest.approx((tensors["policy_logprobs_BT"] - tensors["ref_logprobs_BT"])[MASK].mean())
    assert found["entropy"] == pytest.approx(tensors["entropy_BT"][MASK].mean())


def test_dropping_every_sequence_leaves_no_effective_samples():
    config = AlgorithmConfig(importance_sampling="sequence_mask", importance_cap=1.001)
    loss, metrics, _, _ = run(inputs(), config)
    found = finalize_metrics(metrics.sums, metrics.maxima)
    assert (loss.item(), found["ess"], found["importance_capped_share"]) == (0.0, 0.0, 1.0)


def test_float32_logprobs_get_float32_gradients():
    tensors = {name: value.float() if value.is_floating_point() else value for name, value in inputs().items()}
    _, _, gradient, _ = run(tensors, AlgorithmConfig(**EVERYTHING))
    assert gradient.dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_total": 0}, "0 trained tokens"),
        ({"sequence_total": 0}, "0 sequences"),
        ({"ref_logprobs_BT": None}, "kl_coef is 0.3"),
        ({"entropy_BT": None}, "entropy_coef is 0.2"),
    ],
)
def test_missing_inputs_are_errors(changes, message):
    arguments = inputs() | {
        "config": AlgorithmConfig(**EVERYTHING),
        "token_total": TOKENS,
        "sequence_total": SEQUENCES,
    }
    with pytest.raises(ValueError, match=message):
        objective(**(arguments | changes))
