"""Passes over a rank's micro-batches, through Megatron's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from relax_pipeline.config import AlgorithmConfig
from relax_pipeline.rl.logprobs import SplitVocabulary, token_logprobs
from relax_pipeline.rl.objective import ObjectiveMetrics, finalize_metrics, objective
from relax_pipeline.trainer.megatron.batches import PackedBatch
from relax_pipeline.trainer.megatron.context import from_all_ranks
from relax_pipeline.trainer.megatron.model import Model
from relax_pipeline.trainer.megatron.parallel import Ranks

# B sequences, T longest completion, N packed tokens of this rank, S of all ranks that share the sequences,
# V this rank's columns of the vocabulary
Answer = Callable[[torch.Tensor, PackedBatch], tuple[torch.Tensor, Any]]
"""From logits_1NV and their batch to a loss and what to keep of it."""


@dataclass(frozen=True, slots=True)
class Passes:
    """Runs the model over micro-batches. Only the last pipeline stage, which has the logits, gets answers."""

    model: Model
    ranks: Ranks

    @torch.no_grad()
    def logprobs(self, batches: Sequence[PackedBatch], temperature: float) -> list[torch.Tensor]:
        """Return logprobs_BT of each micro-batch's completions, without dropout."""
        for chunk in self.model.wrapped:
            chunk.eval()

        def answer(logits_1NV: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
            logprobs_BT, _ = self._token_logprobs(logits_1NV, batch, temperature)
            return logits_1NV.new_zeros(()), logprobs_BT

        return self._run(batches, answer, forward_only=True)

    def with_references(self, batches: Sequence[PackedBatch], temperature: float) -> list[PackedBatch]:
        """Return the micro-batches with the logprobs of the base; they are as they were where this stage has none."""
        with self.model.bare():
            references = self.logprobs(batches, temperature)
        if not references:
            return list(batches)
        return [replace(b, ref_logprobs_BT=values) for b, values in zip(batches, references, strict=True)]

    def train(
        self,
        batches: Sequence[PackedBatch],
        temperature: float,
        algorithm: AlgorithmConfig,
        *,
        token_total: int,
        sequence_total: int,
    ) -> dict[str, float]:
        """Leave the reduced gradient of the objective in the gradient buffers; return the metrics of all ranks."""
        for chunk in self.model.wrapped:
            chunk.train()
            chunk.zero_grad_buffer()

        def answer(logits_1NV: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, ObjectiveMetrics]:
            logprobs_BT, entropy_BT = self._token_logprobs(
                logits_1NV, batch, temperature, with_entropy=True, entropy_grad=algorithm.entropy_coef > 0
            )
            return objective(
                policy_logprobs_BT=logprobs_BT,
                old_logprobs_BT=batch.padded.old_logprobs_BT,
                rollout_logprobs_BT=batch.padded.rollout_logprobs_BT,
                ref_logprobs_BT=batch.ref_logprobs_BT,
                entropy_BT=entropy_BT,
                advantages_B=batch.padded.advantages_B,
                mask_BT=batch.padded.mask_BT,
                config=algorithm,
                token_total=token_total,
                sequence_total=sequence_total,
            )

        parts = self._run(batches, answer, forward_only=False)
        mine = _on_cpu(reduce(add, parts)) if self.ranks.answers else None
        total = reduce(add, [part for part in self.ranks.gather(mine) if part is not None])
        return finalize_metrics(total.sums, total.maxima)

    def _run(self, batches: Sequence[PackedBatch], answer: Answer, *, forward_only: bool) -> list[Any]:
        def step(data: Iterator[PackedBatch], chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            batch = next(data)
            output = chunk(batch.input_ids_1N, batch.position_ids_1N, None, packed_seq_params=batch.packing)
            tokens = torch.ones((), dtype=torch.int, device=self.ranks.device)  # asked for by Megatron, and not used

            def finish(logits_1NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
                loss, kept = answer(logits_1NV, batch)
                return loss, tokens, kept

            return output, finish

        wrapped = self.model.wrapped
        schedule: Callable[..., list[Any]] = get_forward_backward_func()
        return schedule(
            forward_step_func=step,
            data_iterator=[iter(batches) for _ in wrapped] if len(wrapped) > 1 else iter(batches),
            model=wrapped if len(wrapped) > 1 else wrapped[0],
            num_microbatches=len(batches),
            seq_length=batches[0].input_ids_1N.shape[1],
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _token_logprobs(
        self, logits_1NV: torch.Tensor, batch: PackedBatch, temperature: float, **entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return logprobs_BT of the completion tokens, and entropy_BT where asked."""
        groups, rows_R = self.ranks.groups, batch.answers_R
        logprobs_R, entropy_R = token_logprobs(
            logits_1NV[0],
            rows_R,
            batch.next_ids_N[rows_R],
            temperature,
            split=SplitVocabulary(self.model.vocabulary, groups.tp),
            **entropy,
        )

        def of_completions(values_R: torch.Tensor) -> torch.Tensor:
            values_N = values_R.new_zeros(logits_1NV.shape[1]).index_copy(0, rows_R, values_R)
            return from_all_ranks(values_N, groups.cp)[batch.predicts_BT]

        return of_completions(logprobs_R), None if entropy_R is None else of_completions(entropy_R)


def _on_cpu(metrics: ObjectiveMetrics) -> ObjectiveMetrics:
    sums, maxima = ({name: value.cpu() for name, value in half.items()} for half in (metrics.sums, metrics.maxima))
    return ObjectiveMetrics(sums, maxima)
