"""How a packed micro-batch is split over the ranks that share it, with places counted by hand."""

from __future__ import annotations

import pytest
import torch
from megatron_models import sample

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

LENGTHS = [8, 4]
CPU = torch.device("cpu")


def test_each_rank_holds_one_chunk_from_either_end_of_each_sequence() -> None:
    from relax_pipeline.trainer.megatron.context import WHOLE, Share, held_tokens

    assert held_tokens(LENGTHS, Share(0, 2)).tolist() == [0, 1, 6, 7, 8, 11]
    assert held_tokens(LENGTHS, Share(1, 2)).tolist() == [2, 3, 4, 5, 9, 10]
    assert held_tokens([3, 2], WHOLE).tolist() == [0, 1, 2, 3, 4]


def test_places_of_gathered_tokens() -> None:
    from relax_pipeline.trainer.megatron.context import gathered_places

    assert gathered_places(LENGTHS, 2).tolist() == [0, 1, 6, 7, 8, 9, 2, 3, 4, 10, 11, 5]


def test_a_chunk_reaches_from_the_start_of_its_sequence_to_its_own_end() -> None:
    from relax_pipeline.trainer.megatron.context import Share, packing

    packed = packing(LENGTHS, Share(1, 2), CPU)
    assert packed.cu_seqlens_q.tolist() == [0, 8, 12]
    assert packed.max_seqlen_q == 8
    assert packed.bounds_queries.tolist() == [0, 2, 4, 5, 6]
    assert packed.bounds_keys.tolist() == [0, 4, 10, 12, 15]
    assert (packed.longest_queries, packed.longest_keys) == (2, 6)
    assert packed.keys_M is not None
    assert packed.keys_M.tolist() == [0, 1, 6, 7, *[0, 1, 6, 7, 8, 9], *[4, 10], *[4, 10, 11]]


def test_all_ranks_have_as_many_pairs_of_query_and_key() -> None:
    from relax_pipeline.trainer.megatron.context import Share, packing

    pairs = []
    for rank in range(3):
        packed = packing([12, 30, 6], Share(rank, 3), CPU)
        queries, keys = packed.bounds_queries.diff(), packed.bounds_keys.diff()
        pairs.append(int((queries * keys - queries * (queries - 1) // 2).sum()))
    assert pairs == [(12 * 13 + 30 * 31 + 6 * 7) // 2 // 3] * 3


@pytest.mark.parametrize(
    ("rank", "ranks", "expected"),
    [(0, 2, [0, 1, 6, 7, 0, 3]), (1, 2, [2, 3, 4, 5, 1, 2]), (0, 1, [*range(8), *range(4)])],
)
def test_positions_are_those_in_the_whole_sequence(rank: int, ranks: int, expected: list[int]) -> None:
    from relax_pipeline.trainer.megatron.context import Share, positions

    assert positions(torch.tensor([0, 8, 12]), len(expected), Share(rank, ranks)).tolist() == expected


def test_a_shared_batch_is_padded_a_sequence_at_a_time_and_finds_its_predictions_among_all_ranks() -> None:
    from relax_pipeline.trainer.megatron.batches import pack
    from relax_pipeline.trainer.megatron.context import Share

    samples = [sample([11, 12], [13, 14, 15]), sample([21], [22])]
    first, second = (pack(samples, CPU, Share(rank, 2), length_multiple=4) for rank in range(2))
    # 11 12 13 14 15 0 0 0 | 21 22 0 0 | 0 0 0 0, so that each rank has a multiple of 4 tokens
    assert first.packing.cu_seqlens_q.tolist() == [0, 8, 12, 16]
    assert first.input_ids_1N.tolist() == [[11, 12, 0, 0, 21, 0, 0, 0]]
    assert second.input_ids_1N.tolist() == [[13, 14, 15, 0, 22, 0, 0, 0]]
    assert second.position_ids_1N.tolist() == [[2, 3, 4, 5, 1, 2, 1, 2]]
    assert (first.answers_R.tolist(), second.answers_R.tolist()) == ([1, 4], [0, 1])
    next_ids = torch.cat([first.next_ids_N, second.next_ids_N])
    assert next_ids[first.predicts_BT[0]].tolist() == [13, 14, 15]
    assert next_ids[first.predicts_BT[1, 0]].item() == 22
    assert torch.equal(first.predicts_BT, second.predicts_BT)
