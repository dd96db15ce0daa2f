"""This process's place among the ranks: process groups, device, and what the ranks decide together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch._C._distributed_c10d import HashStore

from relax_pipeline.config import MegatronTrainerConfig
from relax_pipeline.errors import RelaxError, TrainerError
from relax_pipeline.trainer.base import RankLayout

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The process groups, and where this process stands in them."""

    groups: ProcessGroupCollection
    control: dist.ProcessGroup
    """All ranks over gloo, for objects: it needs no GPU memory."""
    device: torch.device
    rank: int
    world_size: int

    @property
    def answers(self) -> bool:
        """Whether this rank knows the logprobs and speaks for the others that do: last stage, first shard and part."""
        return self.is_last_stage and self.groups.tp.rank() == 0 and self.groups.cp.rank() == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank's pipeline stage ends in the logits."""
        return bool(self.groups.pp.rank() == self.groups.pp.size() - 1)

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in rank order, on every rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return cast(list[T], values)

    def on_first(self, make: Callable[[], T]) -> T:
        """Run on rank 0, and return its result on every rank.

        Raises:
            RelaxError: What rank 0 raised, on every rank.
        """
        answer: list[Any] = [None]
        if self.rank == 0:
            try:
                answer = [make()]
            except RelaxError as error:
                answer = [error]
        dist.broadcast_object_list(answer, src=0, group=self.control)
        if isinstance(answer[0], RelaxError):
            raise answer[0]
        return cast(T, answer[0])


def join(layout: RankLayout, settings: MegatronTrainerConfig, *, device: torch.device, seed: int) -> Ranks:
    """Meet the other ranks and form Megatron's process groups.

    Raises:
        TrainerError: The number of ranks is not what the settings need.
    """
    if layout.world_size != settings.world_size:
        raise TrainerError(
            f"the settings need {settings.world_size} ranks (tensor {settings.tensor_parallel_size} x context "
            f"{settings.context_parallel_size} x pipeline {settings.pipeline_parallel_size} x data "
            f"{settings.data_parallel_size}), and {layout.world_size} started"
        )
    timeout = timedelta(seconds=settings.step_timeout_seconds)
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=layout.init_method,
            store=None if layout.init_method else HashStore(),
            rank=layout.rank,
            world_size=layout.world_size,
            timeout=timeout,
        )
    if not parallel_state.model_parallel_is_initialized():
        pieces = settings.virtual_pipeline_parallel_size
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=settings.tensor_parallel_size,
            pipeline_model_parallel_size=settings.pipeline_parallel_size,
            virtual_pipeline_model_parallel_size=pieces if pieces > 1 else None,
            context_parallel_size=settings.context_parallel_size,
            expert_model_parallel_size=settings.expert_parallel_size,
            expert_tensor_parallel_size=settings.expert_tensor_parallel_size,
            distributed_timeout_minutes=max(1, round(timeout.total_seconds() / 60)),
        )
    model_parallel_cuda_manual_seed(seed % (1 << 31), force_reset_rng=True)
    return Ranks(
        groups=ProcessGroupCollection.use_mpu_process_groups(),
        control=dist.new_group(backend="gloo", timeout=timeout),
        device=device,
        rank=layout.rank,
        world_size=layout.world_size,
    )


def leave() -> None:
    """Dissolve the process groups of this process."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
