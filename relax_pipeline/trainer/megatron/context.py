"""Context parallelism: which tokens of a packed micro-batch each rank holds, and how their queries reach all keys.

Rank r of R holds of each sequence the r-th of 2 R equal chunks and the r-th from the end, so that under a causal mask
all ranks have the same work. It is Megatron's order too, which its gated delta nets count on. Queries stay where they
are, and keys and values come from all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from numpy.typing import NDArray

# N of a rank's tokens, S all ranks' tokens, M keys with repetition, H heads, D head size


class Share(NamedTuple):
    """Which part of each sequence a rank holds."""

    rank: int
    ranks: int

    @property
    def multiple(self) -> int:
        """What the length of each sequence must be a multiple of."""
        return 2 * self.ranks if self.ranks > 1 else 1


WHOLE = Share(rank=0, ranks=1)


@dataclass(kw_only=True)
class Packing(PackedSeqParams):  # type: ignore[misc]
    """Megatron's bounds are of whole sequences; these are of a rank's chunks, and of what each of them attends to.

    A chunk's keys reach from the start of its sequence to the chunk's own end: the causal mask is aligned at the ends.
    """

    bounds_queries: torch.Tensor
    """int32, where chunks start among the rank's tokens; the last one is N."""
    bounds_keys: torch.Tensor
    """int32, where a chunk's keys start; the last one is M."""
    longest_queries: int
    longest_keys: int
    keys_M: torch.Tensor | None
    """int64, where the keys lie among those of all ranks, one rank after another; None: this rank has all of them."""


def held_tokens(lengths: Sequence[int], share: Share) -> NDArray[np.int64]:
    """Return the places of a rank's tokens among all packed ones, in the rank's order.

    Args:
        lengths: Of the packed sequences, each a multiple of share.multiple.
        share: Which rank.
    """
    return np.concatenate([np.arange(start, end) for _, start, end in _chunks(lengths, share)])


def gathered_places(lengths: Sequence[int], ranks: int) -> NDArray[np.int64]:
    """Return where each packed token lies when the tokens of all ranks are put one rank after another."""
    return np.argsort(np.concatenate([held_tokens(lengths, Share(rank, ranks)) for rank in range(ranks)]))


def packing(lengths: Sequence[int], share: Share, device: torch.device) -> Packing:
    """Return where sequences and a rank's chunks lie."""
    chunks = list(_chunks(lengths, share))
    queries = [end - start for _, start, end in chunks]
    keys = [end - first for first, _, end in chunks]
    keys_M = np.concatenate([np.arange(first, end) for first, _, end in chunks])

    def bounds(sizes: Sequence[int]) -> torch.Tensor:
        return torch.tensor(np.cumsum([0, *sizes]), dtype=torch.int32, device=device)

    whole = bounds(lengths)
    return Packing(
        qkv_format="thd",
        cu_seqlens_q=whole,
        cu_seqlens_kv=whole,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        bounds_queries=bounds(queries),
        bounds_keys=bounds(keys),
        longest_queries=max(queries),
        longest_keys=max(keys),
        keys_M=torch.from_numpy(gathered_places(lengths, share.ranks)[keys_M]).to(device) if share.ranks > 1 else None,
    )


def positions(cu_seqlens: torch.Tensor, count: int, share: Share) -> torch.Tensor:
    """Return the places of a rank's tokens in their own sequences, int64 [count].

    Args:
        cu_seqlens: int32, where whole sequences start; the last one is count times the ranks.
        count: Number of the rank's tokens.
        share: Which rank.
    """
    bounds = cu_seqlens // share.ranks
    lengths = bounds.diff()

    def of_tokens(values: torch.Tensor) -> torch.Tensor:
        return torch.repeat_interleave(values, lengths, output_size=count)

    places_N = torch.arange(count, device=cu_seqlens.device) - of_tokens(bounds[:-1])
    if share.ranks == 1:
        return places_N
    chunk_N = of_tokens(lengths // 2)
    skipped_N = torch.where(places_N < chunk_N, share.rank, 2 * (share.ranks - 1) - share.rank)  # chunks of others
    return places_N + skipped_N * chunk_N


def reached_keys(
    key_NHD: torch.Tensor, value_NHD: torch.Tensor, keys_M: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values, [M, H, D] each, that a rank's queries attend to.

    In the backward pass each rank adds up what all ranks' queries make of its own keys and values.
    """
    both_S2HD = gather_from_sequence_parallel_region(torch.stack([key_NHD, value_NHD], dim=1), group=group)
    key_MHD, value_MHD = both_S2HD.index_select(0, keys_M).unbind(1)
    return key_MHD, value_MHD


def from_all_ranks(values_N: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return values_S, one rank's after another's, from which all ranks compute the same loss.

    So a rank gets the gradient of its own values only once, from its own copy of the loss.
    """
    values_S = gather_from_sequence_parallel_region(values_N, tensor_parallel_output_grad=False, group=group)
    return cast(torch.Tensor, values_S)


def _chunks(lengths: Sequence[int], share: Share) -> Iterator[tuple[int, int, int]]:
    """Yield of each chunk of a rank, in its order: start of its sequence, its own start, its end."""
    for first, end in pairwise(np.cumsum([0, *lengths]).tolist()):
        if share.ranks == 1:
            yield first, first, end
            continue
        size = (end - first) // (2 * share.ranks)
        for number in (share.rank, 2 * share.ranks - 1 - share.rank):
            yield first, first + number * size, first + (number + 1) * size
