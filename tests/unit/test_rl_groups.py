from __future__ import annotations

import numpy as np
import pytest

from relax_pipeline.rl.groups import Rollout, RolloutGroup, make_samples, split_updates
from relax_pipeline.types import Completion, DataPosition, Prompt, Score, TrainingSample


def sample(advantage: float = 0.5) -> TrainingSample:
    return TrainingSample(
        prompt_ids=np.array([1]),
        completion_ids=np.array([11]),
        loss_mask=np.array([True]),
        rollout_logprobs=np.array([-1.0], dtype=np.float32),
        advantage=advantage,
        policy_version=4,
    )


def rollout(*finish_reasons: tuple[str, ...]) -> Rollout:
    groups = []
    for index, reasons in enumerate(finish_reasons):
        completions = tuple(
            Completion(
                token_ids=np.array([10 * index + place, 7]),
                rollout_logprobs=np.array([-0.5, -0.25], dtype=np.float32),
                finish_reason=reason,
                policy_version=3,
                engine_id="e",
                incarnation="i",
            )
            for place, reason in enumerate(reasons)
        )
        prompt = Prompt(index=index, text="", token_ids=(1, 2, index), label="")
        groups.append(RolloutGroup(prompt, completions, ("",) * len(reasons), (Score(0.0),) * len(reasons)))
    return Rollout(step=0, groups=tuple(groups), dropped=(), next_position=DataPosition(), seconds={})


def test_samples_carry_what_the_engine_sampled():
    rewards = [np.array([1.0, 0.0]), np.array([0.0, 3.0, 0.0])]
    groups = make_samples(
        rollout(("stop", "stop"), ("stop", "stop", "stop")), rewards, advantage="group", filter_overlong=False
    )
    assert [[s.advantage for s in group] for group in groups] == [[0.5, -0.5], [-1.0, 2.0, -1.0]]
    last = groups[1][2]
    assert last.prompt_ids.tolist() == [1, 2, 1]
    assert last.completion_ids.tolist() == [12, 7]
    assert last.loss_mask.tolist() == [True, True]
    assert last.rollout_logprobs.tolist() == [-0.5, -0.25]
    assert (last.policy_version, last.policy_logprobs) == (3, None)


@pytest.mark.parametrize(("filter_overlong", "mask"), [(True, [False, False]), (False, [True, True])])
def test_overlong_completions_are_masked_when_asked_and_stay_in_the_baseline(filter_overlong, mask):
    (group,) = make_samples(
        rollout(("stop", "length")), [np.array([1.0, 0.0])], advantage="group", filter_overlong=filter_overlong
    )
    assert group[1].loss_mask.tolist() == mask
    assert group[0].advantage == 0.5


def test_aborted_completions_neither_train_nor_count_in_the_baseline():
    rewards = [np.array([1.0, 100.0, 0.0]), np.array([1.0])]
    groups = make_samples(
        rollout(("stop", "abort", "stop"), ("abort",)), rewards, advantage="group", filter_overlong=False
    )
    assert [[s.advantage for s in group] for group in groups] == [[0.5, -0.5]]


@pytest.mark.parametrize("rewards", [[], [np.array([1.0])]])
def test_rewards_must_match_the_completions(rewards):
    with pytest.raises(ValueError, match="zip"):
        make_samples(rollout(("stop", "stop")), rewards, advantage="group", filter_overlong=False)


@pytest.mark.parametrize(
    ("updates", "expected"),
    [(1, [[0, 0, 1, 2, 2, 3, 4]]), (2, [[0, 0, 1], [2, 2, 3, 4]]), (5, [[0, 0], [1], [2, 2], [3], [4]])],
)
def test_updates_are_whole_groups_in_order(updates, expected):
    groups = [[sample(advantage=group)] * size for group, size in enumerate([2, 1, 2, 1, 1])]
    assert [[s.advantage for s in part] for part in split_updates(groups, updates)] == expected


@pytest.mark.parametrize("groups", [0, 2])
def test_fewer_groups_than_updates_give_fewer_updates(groups):
    assert [len(part) for part in split_updates([[sample()]] * groups, 3)] == [1] * groups
