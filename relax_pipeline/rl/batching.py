"""From training samples to micro-batches, and from a micro-batch to padded tensors."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from relax_pipeline.types import TrainingSample

# B sequences, P longest prompt, T longest completion, S = P + T


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Prompts padded on the left, completions on the right: all completions start at column S - T."""

    input_ids_BS: torch.Tensor
    attention_mask_BS: torch.Tensor
    """int64, 1 on real tokens."""
    position_ids_BS: torch.Tensor
    """0 on the first real token of a row, and on padding."""
    completion_ids_BT: torch.Tensor
    mask_BT: torch.Tensor
    """bool, tokens that train; False on padding."""
    rollout_logprobs_BT: torch.Tensor
    """float32, 0 on padding."""
    old_logprobs_BT: torch.Tensor | None
    """float32, 0 on padding; None where the samples have none."""
    advantages_B: torch.Tensor
    """float32."""


def micro_batches(
    samples: Sequence[TrainingSample],
    budget_tokens: int,
    *,
    packed: bool = False,
    at_least: int = 1,
    multiple: int = 1,
) -> list[list[int]]:
    """Return indices into samples, each once, batched so that a padded batch holds at most budget_tokens.

    Longest first, ties in their order; a sample longer than the budget is a batch of its own. There are as few batches
    as the budget allows, or as many as asked for where there are samples enough, and those are about equally large: the
    largest of them sets the pace of all ranks and the peak of memory. Packed batches have no padding, so only the
    samples' own tokens count.
    """
    order = sorted(range(len(samples)), key=lambda index: -samples[index].num_tokens)
    count = max(at_least, len(_filled(samples, order, budget_tokens, packed)))
    wanted = min(count + -count % multiple, len(samples))

    def suffices(limit: int) -> bool:
        return len(_filled(samples, order, limit, packed)) <= wanted

    return _filled(samples, order, bisect_left(range(budget_tokens), True, key=suffices), packed)


def _filled(samples: Sequence[TrainingSample], order: Sequence[int], limit: int, packed: bool) -> list[list[int]]:
    """Return batches of consecutive samples, each filled as far as the limit of tokens allows."""
    batches: list[list[int]] = []
    held = _Size()
    for index in order:
        grown = held.with_sample(samples[index])
        if batches and grown.tokens(packed) <= limit:
            batches[-1].append(index)
            held = grown
        else:
            batches.append([index])
            held = _Size().with_sample(samples[index])
    return batches


def split_for_rank(
    batches: Sequence[Sequence[int]],
    samples: Sequence[TrainingSample],
    *,
    rank: int,
    world_size: int,
    packed: bool = False,
) -> list[list[int]]:
    """Return the micro-batches of one data-parallel rank; every rank gets the same number of them.

    Batches are halved until they go round, so a batch is empty only where there are fewer samples than ranks. The n-th
    batches of all ranks are alike in size, because ranks wait for each other at each; odd rounds are dealt backwards,
    so that no rank always gets the largest.
    """
    dealt = [list(batch) for batch in batches]
    while len(dealt) % world_size and any(len(batch) > 1 for batch in dealt):
        largest = max(
            (batch for batch in dealt if len(batch) > 1), key=lambda batch: _num_tokens(samples, batch, packed)
        )
        dealt.remove(largest)
        dealt += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    dealt.sort(key=lambda batch: -_num_tokens(samples, batch, packed))
    dealt += [[] for _ in range(-len(dealt) % world_size)]
    rounds = [dealt[start : start + world_size] for start in range(0, len(dealt), world_size)]
    return [round_[rank if number % 2 == 0 else world_size - 1 - rank] for number, round_ in enumerate(rounds)]


def batch_samples(samples: Sequence[TrainingSample], indices: Sequence[int]) -> list[TrainingSample]:
    """Return the samples of a micro-batch; of an empty one, which only keeps ranks in step, one that trains nothing."""
    if indices:
        return [samples[index] for index in indices]
    return [replace(samples[0], loss_mask=np.zeros_like(samples[0].loss_mask))]


def by_sample(
    indices: Sequence[int], logprobs_BT: torch.Tensor, samples: Sequence[TrainingSample]
) -> dict[int, NDArray[np.float32]]:
    """Return the [T] logprobs of each sample's own completion, by its place among all samples."""
    rows = zip(indices, logprobs_BT.cpu().numpy(), strict=False)  # without samples there still is one row
    return {index: row[: len(samples[index].completion_ids)].copy() for index, row in rows}


def pad_batch(samples: Sequence[TrainingSample], pad_token_id: int, device: torch.device | str = "cpu") -> PaddedBatch:
    """Stack samples into tensors. The last T + 1 logits of the model, less the last one, predict completion_ids_BT.

    Raises:
        ValueError: A prompt is empty, so nothing predicts its first completion token; or some samples have
            policy_logprobs and some have not.
    """
    prompts = [sample.prompt_ids for sample in samples]
    completions = [sample.completion_ids for sample in samples]
    if not all(len(prompt_ids) for prompt_ids in prompts):
        raise ValueError("a sample has an empty prompt, so nothing predicts its first token; give it a BOS token")
    completion_ids_BT = _pad(completions, pad_token_id)
    input_ids_BS = np.hstack([_pad(prompts, pad_token_id, left=True), completion_ids_BT])
    attention_mask_BS = np.hstack(
        [
            _pad([np.ones_like(row) for row in prompts], 0, left=True),
            _pad([np.ones_like(row) for row in completions], 0),
        ]
    )
    old = [sample.policy_logprobs for sample in samples if sample.policy_logprobs is not None]
    if len(old) not in (0, len(samples)):
        raise ValueError(f"{len(old)} of {len(samples)} samples have policy_logprobs; give them to all or none")

    def tensor(array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return PaddedBatch(
        input_ids_BS=tensor(input_ids_BS),
        attention_mask_BS=tensor(attention_mask_BS),
        position_ids_BS=tensor((attention_mask_BS.cumsum(axis=1) - 1) * attention_mask_BS),
        completion_ids_BT=tensor(completion_ids_BT),
        mask_BT=tensor(_pad([sample.loss_mask for sample in samples], False)),
        rollout_logprobs_BT=tensor(_pad([sample.rollout_logprobs for sample in samples], 0.0)),
        old_logprobs_BT=tensor(_pad(old, 0.0)) if old else None,
        advantages_B=tensor(np.array([sample.advantage for sample in samples], dtype=np.float32)),
    )


class _Size(NamedTuple):
    """How large a batch is; it grows sample by sample, in constant time."""

    samples: int = 0
    prompt: int = 0
    completion: int = 0
    own_tokens: int = 0

    def with_sample(self, sample: TrainingSample) -> _Size:
        return _Size(
            self.samples + 1,
            max(self.prompt, len(sample.prompt_ids)),
            max(self.completion, len(sample.completion_ids)),
            self.own_tokens + sample.num_tokens,
        )

    def tokens(self, packed: bool) -> int:
        """Tokens of the batch; unless packed, prompts and completions are padded each to their own longest."""
        return self.own_tokens if packed else self.samples * (self.prompt + self.completion)


def _num_tokens(samples: Sequence[TrainingSample], indices: Sequence[int], packed: bool) -> int:
    size = _Size()
    for index in indices:
        size = size.with_sample(samples[index])
    return size.tokens(packed)


def _pad(rows: Sequence[NDArray[np.generic]], fill: float, *, left: bool = False) -> NDArray[np.generic]:
    width = max(len(row) for row in rows)
    padded = np.full((len(rows), width), fill, dtype=rows[0].dtype)
    for padded_row, row in zip(padded, rows, strict=True):
        padded_row[width - len(row) if left else 0 :][: len(row)] = row
    return padded
