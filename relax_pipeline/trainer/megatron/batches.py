"""A micro-batch as Megatron reads it: samples packed one after another, without padding between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from relax_pipeline.config import MegatronTrainerConfig
from relax_pipeline.rl.batching import PaddedBatch, batch_samples, micro_batches, pad_batch, split_for_rank
from relax_pipeline.trainer.megatron.context import WHOLE, Packing, Share, gathered_places, held_tokens, packing
from relax_pipeline.trainer.megatron.parallel import Ranks
from relax_pipeline.types import TrainingSample

# S packed tokens, N of them on this rank; B sequences, T longest completion


_TO_FILL = 4
"""Micro-batches for each stage of a pipeline: of p stages with m micro-batches each waits (p - 1) / (m + p - 1) of the
time. Source: Huang et al. 2019, arXiv:1811.06965."""
_PARTS_OF_BUDGET = 4
"""None is made smaller for that than the budget by this: a GPU would wait for its kernels to be launched."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One row of this rank's tokens, and where the completions are among those of all ranks that share the samples."""

    input_ids_1N: torch.Tensor
    position_ids_1N: torch.Tensor
    """0 on the first token of each sample."""
    next_ids_N: torch.Tensor
    """The token that follows; after a sample's last one, anything."""
    answers_R: torch.Tensor
    """int64, which of this rank's tokens are followed by one of a completion."""
    packing: Packing
    predicts_BT: torch.Tensor
    """int64, which logit predicts a completion token, counted through all ranks' one after another; 0 on padding."""
    padded: PaddedBatch
    """The same samples for the loss, whose tensors have a row a completion."""
    ref_logprobs_BT: torch.Tensor | None = None


class RankBatch(NamedTuple):
    """Which of all samples a micro-batch holds; none where it only keeps ranks in step."""

    indices: list[int]
    packed: PackedBatch


def own_batches(samples: Sequence[TrainingSample], settings: MegatronTrainerConfig, ranks: Ranks) -> list[RankBatch]:
    """Return this rank's micro-batches of a step's samples."""
    data, context = ranks.groups.dp, ranks.groups.cp
    return rank_batches(
        samples,
        settings.micro_batch_tokens,
        rank=data.rank(),
        world_size=data.size(),
        device=ranks.device,
        share=Share(context.rank(), context.size()),
        at_least=to_fill(sum(sample.num_tokens for sample in samples) // data.size(), settings),
        length_multiple=settings.tensor_parallel_size if settings.sequence_parallel else 1,
        count_multiple=settings.pipeline_parallel_size if settings.virtual_pipeline_parallel_size > 1 else 1,
    )


def to_fill(tokens: int, settings: MegatronTrainerConfig) -> int:
    """Return how many micro-batches a rank's tokens of a step should make at least, for the stages of a pipeline."""
    stages = settings.pipeline_parallel_size
    most = tokens * _PARTS_OF_BUDGET // settings.micro_batch_tokens
    return max(1, min(_TO_FILL * stages, most)) if stages > 1 else 1


def rank_batches(
    samples: Sequence[TrainingSample],
    budget_tokens: int,
    *,
    rank: int,
    world_size: int,
    device: torch.device,
    share: Share = WHOLE,
    at_least: int = 1,
    length_multiple: int = 1,
    count_multiple: int = 1,
) -> list[RankBatch]:
    """Return one data-parallel rank's micro-batches. All ranks get as many, since each is a collective.

    Args:
        samples: Of the whole step.
        budget_tokens: Most tokens of a micro-batch; one longer sample is a micro-batch of its own.
        rank: Among the data-parallel ranks.
        world_size: Number of data-parallel ranks.
        device: Where the tensors go.
        share: Which part of each sequence this rank holds.
        at_least: Micro-batches of each rank, where there are samples enough.
        length_multiple: A rank's tokens are padded to a multiple of this, as sequence parallelism needs.
        count_multiple: Micro-batches are padded, without effect, to a multiple of this, as pipelines in pieces need.
    """
    batches = micro_batches(
        samples, budget_tokens, packed=True, at_least=at_least * world_size, multiple=world_size * count_multiple
    )
    mine = split_for_rank(batches, samples, rank=rank, world_size=world_size, packed=True)
    mine += [[] for _ in range(-len(mine) % count_multiple)]
    return [
        RankBatch(indices, pack(batch_samples(samples, indices), device, share, length_multiple)) for indices in mine
    ]


def pack(
    samples: Sequence[TrainingSample], device: torch.device, share: Share = WHOLE, length_multiple: int = 1
) -> PackedBatch:
    """Put samples one after another and keep a rank's share; what pads the end is a sequence of its own.

    Raises:
        ValueError: As `pad_batch`.
    """
    padded = pad_batch(samples, 0, device)
    rows = [np.concatenate([sample.prompt_ids, sample.completion_ids]) for sample in samples]
    rows = [np.pad(row, (0, -len(row) % share.multiple)) for row in rows]
    if filling := -sum(map(len, rows)) % lcm(share.multiple, share.ranks * length_multiple):
        rows.append(np.zeros(filling, dtype=np.int64))
    lengths = [len(row) for row in rows]
    starts = np.cumsum([0, *lengths])
    predicts_BT = np.zeros(padded.mask_BT.shape, dtype=np.int64)
    answers_S = np.zeros(starts[-1], dtype=bool)
    for row, sample in enumerate(samples):
        first = starts[row] + len(sample.prompt_ids) - 1
        predicts_BT[row, : len(sample.completion_ids)] = first + np.arange(len(sample.completion_ids))
        answers_S[first : first + len(sample.completion_ids)] = True
    tokens_S = np.concatenate(rows)
    held_N = held_tokens(lengths, share)

    def held(values_S: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values_S[held_N]).to(device)

    return PackedBatch(
        input_ids_1N=held(tokens_S)[None],
        position_ids_1N=held(np.concatenate([np.arange(length) for length in lengths]))[None],
        next_ids_N=held(np.roll(tokens_S, -1)),
        answers_R=torch.from_numpy(np.flatnonzero(answers_S[held_N])).to(device),
        packing=packing(lengths, share, device),
        predicts_BT=torch.from_numpy(gathered_places(lengths, share.ranks)[predicts_BT]).to(device),
        padded=padded,
    )
