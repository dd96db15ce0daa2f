"""What GPUs have room for and the settings do not use."""

from __future__ import annotations

from relax_pipeline.config import MegatronTrainerConfig, RunConfig, SglangEngineConfig
from relax_pipeline.memory import TrainerMemory
from relax_pipeline.memory_gpu import EngineMemory, stays_awake

_LEFT_FREE = 10
"""One part in so many of a GPU: estimates are within 5%, and CUDA takes its own."""
_WORTH_IT = 1.5


def unused_room(
    config: RunConfig, trainer: TrainerMemory | None, engine: EngineMemory | None, *, sent: int, gpu_bytes: int
) -> list[str]:
    """Return advice that would make steps faster: fewer micro-batches, and all completions at once.

    Args:
        config: Of the run.
        trainer: Of a rank, where it is known.
        engine: Of an engine's GPU, where it is known.
        sent: Bytes that stay on the trainer's GPU for engines.
        gpu_bytes: Of a GPU.
    """
    notes = []
    if trainer:
        beside = stays_awake(config, engine, gpu_bytes)
        free = gpu_bytes - gpu_bytes // _LEFT_FREE - beside - trainer.fixed - sent
        fits = free * trainer.tokens // (trainer.activations + trainer.logits)
        useful = min(fits, _tokens_of_a_rank(config)) // 1024 * 1024
        if useful >= _WORTH_IT * trainer.tokens:
            notes.append(
                f"trainer.micro_batch_tokens is {config.trainer.micro_batch_tokens:,}, and this GPU has room for "
                f"{useful:,} of a step's tokens at once: fewer and larger micro-batches are faster, small models most"
            )
    if engine and isinstance(config.engine, SglangEngineConfig):
        wanted = -(-config.rollout.completions_per_step // config.engine.replicas)
        cache = int(config.engine.memory_fraction * gpu_bytes) - engine.weights - engine.adapters
        of_completion = max(1, engine.cache_of_token * config.longest_sequence)
        at_once = min(cache // of_completion, config.engine.max_running_requests)
        if wanted >= _WORTH_IT * at_once:
            notes.append(
                f"an engine generates {at_once:,} of its {wanted:,} completions of a step at once if all are of full "
                "length: raise engine.memory_fraction, which engine.offload lends to a colocated trainer, and "
                "engine.max_running_requests with engine.cuda_graph_max_batch, or use more engines"
            )
    return notes


def _tokens_of_a_rank(config: RunConfig) -> int:
    """Return the tokens that a data-parallel rank has of one optimizer step, where all sequences are of full length."""
    trainer = config.trainer
    ranks = trainer.data_parallel_size if isinstance(trainer, MegatronTrainerConfig) else trainer.num_processes
    tokens = config.rollout.completions_per_step * config.longest_sequence
    return tokens // config.algorithm.updates_per_rollout // ranks
