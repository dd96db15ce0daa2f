"""Forward passes of the fsdp trainer over padded micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from relax_pipeline.config import AlgorithmConfig
from relax_pipeline.models import adapters_disabled
from relax_pipeline.rl.batching import PaddedBatch, batch_samples, micro_batches, pad_batch, split_for_rank
from relax_pipeline.rl.logprobs import token_logprobs
from relax_pipeline.rl.objective import ObjectiveMetrics, objective
from relax_pipeline.trainer.base import RankLayout
from relax_pipeline.trainer.policy import Policy
from relax_pipeline.types import TrainingSample

# B sequences, T longest completion, U = T + 1, V vocabulary, R completion tokens


@dataclass(frozen=True, slots=True)
class Passes:
    """Runs the policy over micro-batches."""

    policy: Policy
    algorithm: AlgorithmConfig

    def objective(
        self, batch: PaddedBatch, temperature: float, *, token_total: int, sequence_total: int
    ) -> tuple[torch.Tensor, ObjectiveMetrics]:
        """Return this micro-batch's share of the step's loss, with gradient, and its metrics."""
        algorithm = self.algorithm
        ref_logprobs_BT = None
        if algorithm.kl_coef > 0:
            with torch.no_grad(), adapters_disabled(self.policy.model):
                ref_logprobs_BT = self.token_logprobs(batch, temperature)[0]
        logprobs_BT, entropy_BT = self.token_logprobs(
            batch, temperature, with_entropy=True, entropy_grad=algorithm.entropy_coef > 0
        )
        return objective(
            policy_logprobs_BT=logprobs_BT,
            old_logprobs_BT=batch.old_logprobs_BT,
            rollout_logprobs_BT=batch.rollout_logprobs_BT,
            ref_logprobs_BT=ref_logprobs_BT,
            entropy_BT=entropy_BT,
            advantages_B=batch.advantages_B,
            mask_BT=batch.mask_BT,
            config=algorithm,
            token_total=token_total,
            sequence_total=sequence_total,
        )

    def token_logprobs(
        self, batch: PaddedBatch, temperature: float, *, with_entropy: bool = False, entropy_grad: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return logprobs_BT of the completion tokens, 0 on padding, and entropy_BT where asked."""
        batch_size, length = batch.completion_ids_BT.shape
        logits_BUV = self.policy.logits(  # U = T + 1, of which the last one predicts nothing
            num_last=length + 1,
            input_ids=batch.input_ids_BS,
            attention_mask=batch.attention_mask_BS,
            position_ids=batch.position_ids_BS,
        )
        places_R = batch.attention_mask_BS[:, -length:].flatten().nonzero()[:, 0]
        logprobs_R, entropy_R = token_logprobs(
            logits_BUV.flatten(0, 1),
            places_R + places_R // length,
            batch.completion_ids_BT.flatten()[places_R],
            temperature,
            with_entropy=with_entropy,
            entropy_grad=entropy_grad,
        )

        def padded(values_R: torch.Tensor) -> torch.Tensor:
            return values_R.new_zeros(batch_size * length).index_copy(0, places_R, values_R).view(batch_size, length)

        return padded(logprobs_R), None if entropy_R is None else padded(entropy_R)


def local_batches(
    samples: Sequence[TrainingSample], budget_tokens: int, layout: RankLayout, device: torch.device
) -> list[tuple[list[int], PaddedBatch]]:
    """Return a rank's micro-batches, and which samples each holds. All ranks get as many: each is a collective."""
    batches = micro_batches(samples, budget_tokens, multiple=layout.world_size)
    mine = split_for_rank(batches, samples, rank=layout.rank, world_size=layout.world_size)
    return [(indices, pad_batch(batch_samples(samples, indices), 0, device)) for indices in mine]
