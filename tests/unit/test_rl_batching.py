from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from relax_pipeline.rl.batching import micro_batches, pad_batch, split_for_rank
from relax_pipeline.types import TrainingSample

PAD = 99


def sample(prompt: int, completion: int, advantage: float = 0.5) -> TrainingSample:
    return TrainingSample(
        prompt_ids=np.arange(1, prompt + 1),
        completion_ids=np.arange(11, completion + 11),
        loss_mask=np.ones(completion, dtype=np.bool_),
        rollout_logprobs=-np.arange(1, completion + 1, dtype=np.float32),
        advantage=advantage,
        policy_version=4,
    )


def test_micro_batches_by_hand():
    samples = [sample(1, 2), sample(2, 8), sample(1, 2), sample(3, 3), sample(3, 3)]
    assert micro_batches(samples, 12) == [[1], [3, 4], [0, 2]]


def test_batches_are_about_equally_large():
    samples = [sample(1, tokens) for tokens in (6, 5, 4, 3, 2, 1)]
    filled_up = [[0, 1, 2], [3, 4, 5]]  # 18 and 9 tokens
    assert micro_batches(samples, 18, packed=True) != filled_up
    assert micro_batches(samples, 18, packed=True) == [[0, 1], [2, 3, 4, 5]]


def test_batches_go_round_where_there_are_samples_enough():
    samples = [sample(1, 3)] * 6
    assert micro_batches(samples, 24, packed=True) == [[0, 1, 2, 3, 4, 5]]
    assert micro_batches(samples, 24, packed=True, multiple=2) == [[0, 1, 2], [3, 4, 5]]
    assert micro_batches(samples, 12, packed=True, multiple=6) == [[0], [1], [2], [3], [4], [5]]
    assert micro_batches(samples, 24, packed=True, multiple=8) == [[0], [1], [2], [3], [4], [5]]


def test_more_batches_than_the_budget_needs_where_asked_for():
    samples = [sample(1, 3)] * 6
    assert micro_batches(samples, 24, packed=True, at_least=3) == [[0, 1], [2, 3], [4, 5]]
    assert micro_batches(samples, 24, packed=True, at_least=3, multiple=2) == [[0, 1], [2, 3], [4, 5]]
    assert micro_batches(samples, 24, packed=True, at_least=9) == [[0], [1], [2], [3], [4], [5]]
    assert micro_batches(samples, 4, packed=True, at_least=3) == [[0], [1], [2], [3], [4], [5]]


def test_a_sample_over_the_budget_is_alone():
    assert micro_batches([sample(2, 2), sample(9, 9), sample(2, 2)], 8) == [[1], [0, 2]]


def test_the_budget_counts_the_padding_of_prompts_and_of_completions():
    assert micro_batches([sample(9, 1), sample(1, 9)], 20) == [[0], [1]]


@pytest.mark.parametrize("seed", range(20))
def test_micro_batches_hold_each_index_once_within_the_budget(seed):
    draw = random.Random(seed)
    samples = [sample(draw.randint(1, 9), draw.randint(1, 30)) for _ in range(draw.randint(0, 40))]
    batches = micro_batches(samples, 64)
    assert sorted(index for batch in batches for index in batch) == list(range(len(samples)))
    for batch in batches:
        assert len(batch) == 1 or pad_batch([samples[i] for i in batch], PAD).input_ids_BS.numel() <= 64


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_ranks_share_all_samples_in_equally_many_batches(seed, world_size):
    draw = random.Random(seed)
    samples = [sample(draw.randint(1, 9), draw.randint(1, 30)) for _ in range(draw.randint(1, 40))]
    batches = micro_batches(samples, 64)
    dealt = [split_for_rank(batches, samples, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert len({len(mine) for mine in dealt}) == 1
    assert sorted(i for mine in dealt for batch in mine for i in batch) == list(range(len(samples)))
    if len(samples) >= world_size:
        assert all(batch for mine in dealt for batch in mine)


def test_one_rank_keeps_the_batches_as_they_are():
    samples = [sample(1, 9), sample(1, 5), sample(1, 2)]
    assert split_for_rank([[0], [1, 2]], samples, rank=0, world_size=1) == [[1, 2], [0]]


def test_ranks_alternate_who_gets_the_larger_batch():
    samples = [sample(1, tokens) for tokens in (8, 7, 6, 5)]
    batches = [[0], [1], [2], [3]]
    assert split_for_rank(batches, samples, rank=0, world_size=2) == [[0], [3]]
    assert split_for_rank(batches, samples, rank=1, world_size=2) == [[1], [2]]


def test_a_batch_is_halved_rather_than_leaving_a_rank_idle():
    samples = [sample(1, 4)] * 6
    dealt = [split_for_rank([list(range(6))], samples, rank=rank, world_size=2) for rank in range(2)]
    assert dealt == [[[0, 1, 2]], [[3, 4, 5]]]


def test_fewer_samples_than_ranks_leave_empty_batches():
    dealt = [split_for_rank([[0]], [sample(1, 4)], rank=rank, world_size=3) for rank in range(3)]
    assert dealt == [[[0]], [[]], [[]]]


def test_prompts_are_padded_left_and_completions_right():
    batch = pad_batch([sample(2, 3, advantage=0.5), sample(3, 1, advantage=-1.5)], PAD)
    assert batch.input_ids_BS.tolist() == [[PAD, 1, 2, 11, 12, 13], [1, 2, 3, 11, PAD, PAD]]
    assert batch.attention_mask_BS.tolist() == [[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]
    assert batch.position_ids_BS.tolist() == [[0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 0, 0]]
    assert batch.completion_ids_BT.tolist() == [[11, 12, 13], [11, PAD, PAD]]
    assert batch.mask_BT.tolist() == [[True, True, True], [True, False, False]]
    assert batch.rollout_logprobs_BT.tolist() == [[-1.0, -2.0, -3.0], [-1.0, 0.0, 0.0]]
    assert batch.old_logprobs_BT is None
    assert batch.advantages_B.tolist() == [0.5, -1.5]


def test_padded_dtypes():
    batch = pad_batch([sample(2, 3)], PAD)
    assert batch.input_ids_BS.dtype == batch.attention_mask_BS.dtype == batch.position_ids_BS.dtype == torch.int64
    assert batch.rollout_logprobs_BT.dtype == batch.advantages_B.dtype == torch.float32
    assert batch.mask_BT.dtype == torch.bool


def test_a_pad_token_inside_a_prompt_is_a_real_token():
    inner = replace(sample(2, 1), prompt_ids=np.array([PAD, 5]))
    assert pad_batch([inner], PAD).attention_mask_BS.tolist() == [[1, 1, 1]]


def test_old_logprobs_are_padded_too():
    first = replace(sample(1, 2), policy_logprobs=np.array([-3.0, -4.0], dtype=np.float32))
    second = replace(sample(1, 1), policy_logprobs=np.array([-5.0], dtype=np.float32))
    assert pad_batch([first, second], PAD).old_logprobs_BT.tolist() == [[-3.0, -4.0], [-5.0, 0.0]]


def test_old_logprobs_of_some_samples_are_an_error():
    first = replace(sample(1, 1), policy_logprobs=np.array([-3.0], dtype=np.float32))
    with pytest.raises(ValueError, match="1 of 2 samples have policy_logprobs"):
        pad_batch([first, sample(1, 1)], PAD)


def test_an_empty_prompt_is_an_error():
    with pytest.raises(ValueError, match="empty prompt"):
        pad_batch([sample(0, 2)], PAD)
