from __future__ import annotations

import math

import pytest
import torch

from relax_pipeline.rl.losses import cispo_loss, clip_loss, gspo_loss, importance_weights, kl

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def f64(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def log(values: list) -> torch.Tensor:
    return f64(values).log()


def test_clip_loss_by_hand():
    log_ratio = log([[1.0, 1.2, 1.5, 0.5], [1.0, 0.9, 1.5, 0.5]])
    loss, clipped = clip_loss(log_ratio, f64([2.0, -3.0]), **CLIP)
    torch.testing.assert_close(loss, f64([[-2.0, -2.4, -2.56, -1.0], [3.0, 2.7, 4.5, 2.4]]), rtol=0, atol=1e-15)
    assert clipped.tolist() == [[False, False, True, False], [False, False, False, True]]


def test_clipped_tokens_have_no_gradient_and_others_minus_advantage_times_ratio():
    log_ratio = log([[1.1, 1.5, 0.5], [1.1, 1.5, 0.5]]).requires_grad_()
    clip_loss(log_ratio, f64([2.0, -3.0]), **CLIP)[0].sum().backward()
    torch.testing.assert_close(log_ratio.grad, f64([[-2.2, 0.0, -1.0], [3.3, 4.5, 0.0]]), rtol=0, atol=1e-14)


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    log_ratio = log([[1.1, 20.0], [9.0, 11.0]]).requires_grad_()
    loss, clipped = clip_loss(log_ratio, f64([2.0, -3.0]), **CLIP, dual_clip=10.0)
    loss.sum().backward()
    torch.testing.assert_close(loss.detach(), f64([[-2.2, -2.56], [27.0, 30.0]]), rtol=0, atol=1e-13)
    torch.testing.assert_close(log_ratio.grad, f64([[-2.2, 0.0], [27.0, 0.0]]), rtol=0, atol=1e-13)
    assert clipped.tolist() == [[False, True], [False, True]]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_enormous_ratio_keeps_loss_and_gradient_finite(advantage):
    log_ratio = torch.tensor([[500.0, -500.0, 0.0]], requires_grad=True)
    loss, _ = clip_loss(log_ratio, torch.tensor([advantage]), **CLIP)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert log_ratio.grad.isfinite().all()


def test_gspo_clips_the_length_normalised_sequence_ratio():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    log_ratio = log([[1.21, 1.0, 50.0], [1.5, 50.0, 50.0]])
    loss, clipped = gspo_loss(log_ratio, f64([2.0, 2.0]), mask, **CLIP)
    torch.testing.assert_close(loss[mask], f64([-2.2, -2.2, -2.56]), rtol=0, atol=1e-14)
    assert clipped[mask].tolist() == [False, False, True]


def test_gspo_gradient_is_that_of_the_sequence_ratio():
    logits = log([[1.05, 0.9, 1.1, 7.0]])
    mask = torch.tensor([[True, True, True, False]])
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    (gspo_loss(ours, f64([-1.5]), mask, **CLIP)[0] * mask).sum().div(3).backward()
    sequence_ratio = (plain[0, 0] + plain[0, 1] + plain[0, 2]).div(3).exp()
    (1.5 * sequence_ratio).backward()
    torch.testing.assert_close(ours.grad, plain.grad, rtol=0, atol=1e-15)


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    policy = log([[0.5, 0.25, 0.125], [0.5, 0.25, 0.125]]).requires_grad_()
    loss, clipped = cispo_loss(policy, log([[1.1, 1.5, 0.5], [1.1, 1.5, 0.5]]), f64([2.0, -3.0]), **CLIP)
    loss.sum().backward()
    torch.testing.assert_close(policy.grad, f64([[-2.2, -2.56, -1.6], [3.3, 3.84, 2.4]]), rtol=0, atol=1e-14)
    assert clipped.tolist() == [[False, True, True], [False, True, True]]


def test_cispo_weight_has_no_gradient():
    policy = log([[0.5]]).requires_grad_()
    cispo_loss(policy, policy - log([[0.5]]), f64([2.0]), **CLIP)[0].sum().backward()
    assert policy.grad.tolist() == [[-2.0]]


def test_weights_off_are_one():
    weights, capped = importance_weights(log([[9.0, 0.1]]), torch.tensor([[True, True]]), "off", 2.0)
    assert weights.tolist() == [[1.0, 1.0]]
    assert capped.tolist() == [[False, False]]


def test_token_weights_are_truncated_above_only():
    weights, capped = importance_weights(
        log([[0.1, 1.5, 3.0]]), torch.tensor([[True, True, True]]), "token_truncate", 2.0
    )
    torch.testing.assert_close(weights, f64([[0.1, 1.5, 2.0]]), rtol=0, atol=1e-15)
    assert capped.tolist() == [[False, False, True]]


def test_sequence_mask_drops_a_sequence_by_its_geometric_mean_on_either_side():
    difference = log([[4.0, 0.5, 99.0], [4.0, 1.5, 99.0], [0.1, 1.5, 99.0]])  # means 1.41, 2.45, 0.39
    mask = torch.tensor([[True, True, False]] * 3)
    weights, dropped = importance_weights(difference, mask, "sequence_mask", 2.0)
    assert weights[:, 0].tolist() == [1.0, 0.0, 0.0]
    assert dropped[:, 0].tolist() == [False, True, True]


def test_sequence_mask_does_not_depend_on_length():
    weights, _ = importance_weights(
        torch.full((1, 1000), 0.01), torch.ones(1, 1000, dtype=torch.bool), "sequence_mask", 2.0
    )
    assert weights.all()


@pytest.mark.parametrize("kind", ["off", "token_truncate", "sequence_mask"])
def test_weights_are_detached(kind):
    weights, _ = importance_weights(
        torch.zeros(2, 3, requires_grad=True), torch.ones(2, 3, dtype=torch.bool), kind, 2.0
    )
    assert not weights.requires_grad


@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [
        ("k1", lambda d: d, lambda d: 1.0),
        ("k2", lambda d: d * d / 2, lambda d: d),
        ("k3", lambda d: math.exp(-d) - 1 + d, lambda d: 1 - math.exp(-d)),
    ],
)
def test_kl_estimators(kind, value, gradient):
    differences = [0.0, 0.7, -1.3]
    policy = f64([[-2.0 + d for d in differences]]).requires_grad_()
    estimate = kl(policy, f64([[-2.0, -2.0, -2.0]]), kind)
    estimate.sum().backward()
    torch.testing.assert_close(estimate.detach(), f64([[value(d) for d in differences]]), rtol=0, atol=1e-15)
    torch.testing.assert_close(policy.grad, f64([[gradient(d) for d in differences]]), rtol=0, atol=1e-15)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_is_unbiased_over_the_policy(kind):
    policy, reference = f64([0.5, 0.3, 0.2]), f64([0.2, 0.2, 0.6])
    exact = sum(p * math.log(p / q) for p, q in zip(policy.tolist(), reference.tolist(), strict=True))
    assert (policy * kl(policy.log(), reference.log(), kind)).sum().item() == pytest.approx(exact, abs=1e-15)


def test_k3_keeps_its_digits_for_nearly_equal_policies():
    assert kl(torch.tensor([[1e-3]]), torch.tensor([[0.0]]), "k3").item() == pytest.approx(4.998e-7, rel=1e-3)
