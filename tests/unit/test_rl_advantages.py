from __future__ import annotations

import statistics

import numpy as np
import pytest

from relax_pipeline.rl.advantages import compute_advantages, has_variance

REWARDS = [np.array([1.0, 0.0, 0.0, 1.0, 0.5]), np.array([2.0, -1.0]), np.array([0.25, 0.5, 0.5])]


def by_loops(rewards: list[np.ndarray], kind: str) -> list[list[float]]:
    groups = [[float(value) for value in group] for group in rewards]
    batch = [value for group in groups for value in group]
    advantages = []
    for group in groups:
        row = []
        for place, value in enumerate(group):
            others = group[:place] + group[place + 1 :]
            row.append(
                {
                    "group": value - statistics.fmean(group),
                    "group_std": (value - statistics.fmean(group)) / (statistics.stdev(group) + 1e-6),
                    "rloo": value - statistics.fmean(others),
                    "reinforce_plus_plus": (value - statistics.fmean(batch)) / (statistics.stdev(batch) + 1e-8),
                }[kind]
            )
        advantages.append(row)
    return advantages


@pytest.mark.parametrize("kind", ["group", "group_std", "rloo", "reinforce_plus_plus"])
def test_each_kind_agrees_with_loops(kind):
    for found, expected in zip(compute_advantages(REWARDS, kind), by_loops(REWARDS, kind), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("group", [0.75, -0.25, -0.25, -0.25]),
        ("group_std", [0.75 / (0.5 + 1e-6), *[-0.25 / (0.5 + 1e-6)] * 3]),
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("reinforce_plus_plus", [0.75 / (0.5 + 1e-8), *[-0.25 / (0.5 + 1e-8)] * 3]),
    ],
)
def test_one_right_of_four(kind, expected):
    (found,) = compute_advantages([np.array([1.0, 0.0, 0.0, 0.0])], kind)
    np.testing.assert_allclose(found, expected, rtol=1e-15)


@pytest.mark.parametrize("kind", ["group", "group_std", "rloo"])
def test_a_completion_alone_in_its_group_has_no_advantage(kind):
    alone, _ = compute_advantages([np.array([0.7]), np.array([1.0, 0.0])], kind)
    assert alone.tolist() == [0.0]


def test_batch_normalisation_sees_groups_of_one():
    alone, _ = compute_advantages([np.array([3.0]), np.array([1.0, 2.0])], "reinforce_plus_plus")
    assert alone.tolist() == [1.0 / (1.0 + 1e-8)]


def test_inputs_are_left_alone():
    rewards = np.array([1.0, 0.0])
    compute_advantages([rewards], "group_std")
    assert rewards.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("kind", ["group", "reinforce_plus_plus"])
def test_no_groups_have_no_advantages(kind):
    assert compute_advantages([], kind) == []


def test_equal_fractions_have_no_variance_although_their_standard_deviation_is_above_zero():
    rewards = np.full(3, 0.1)
    assert rewards.std() > 0
    assert not has_variance(rewards)


def test_one_different_reward_is_variance():
    assert has_variance(np.array([0.1, 0.1, 0.1 + 1e-12]))


@pytest.mark.parametrize("rewards", [[], [1.0]])
def test_fewer_than_two_rewards_have_no_variance(rewards):
    assert has_variance(np.array(rewards)) is False
