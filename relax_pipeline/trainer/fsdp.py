"""The transformers + PEFT trainer: one process as it stands, FSDP2 over several. Runs on a CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from relax_pipeline.config import FsdpTrainerConfig, RunConfig
from relax_pipeline.errors import TrainerError
from relax_pipeline.lora.adapter import write_adapter
from relax_pipeline.lora.warm_start import read_warm_start
from relax_pipeline.models import adapters_disabled
from relax_pipeline.rl.batching import PaddedBatch, by_sample
from relax_pipeline.rl.objective import ObjectiveMetrics, finalize_metrics
from relax_pipeline.safetensors_io.identity import model_digest
from relax_pipeline.seeds import derive_seed
from relax_pipeline.trainer.adamw import make_adamw
from relax_pipeline.trainer.base import Bucket, Payload, RankLayout, TrainerInfo
from relax_pipeline.trainer.fsdp_passes import Passes, local_batches
from relax_pipeline.trainer.fsdp_ranks import gather, join, reduce, saving_group
from relax_pipeline.trainer.fsdp_state import load_state, state_copy, write_state
from relax_pipeline.trainer.policy import Policy, full_tensor
from relax_pipeline.trainer.schedule import learning_rate
from relax_pipeline.trainer.totals import trained_totals
from relax_pipeline.types import TrainingSample


class FsdpTrainer:
    """Implements `Trainer`. What trains is float32, as is the optimizer state; the base has the config's dtype."""

    def __init__(self, config: RunConfig, layout: RankLayout | None = None) -> None:
        assert isinstance(config.trainer, FsdpTrainerConfig)
        self._config, self._settings = config, config.trainer
        self._layout = layout or RankLayout()
        self._device = join(self._layout, self._settings)
        self._saving = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._saving_group = saving_group(self._layout, self._settings)
        self._policy = Policy(
            config,
            device=self._device,
            shard=self._layout.world_size > 1,
            gradient_checkpointing=self._settings.gradient_checkpointing,
        )
        self._passes = Passes(self._policy, config.algorithm)
        self._optimizer = make_adamw(self._policy.parameters.values(), config.optimizer)
        self._updates = 0
        self._written: Future[None] | None = None

    def info(self) -> TrainerInfo:
        """See `Trainer.info`."""
        trained = sum(parameter.numel() for parameter in self._policy.parameters.values())
        frozen = sum(parameter.numel() for parameter in self._policy.frozen.values())
        return TrainerInfo(
            base_tensors_digest=self._policy.base_tensors_digest,
            modules=self._policy.modules,
            num_trainable=trained,
            num_parameters=frozen or trained,
            device=str(self._device),
        )

    def policy_version(self) -> int:
        """See `Trainer.policy_version`."""
        return self._updates

    @torch.no_grad()
    def logprobs(
        self, samples: Sequence[TrainingSample], *, temperature: float, adapter_enabled: bool = True
    ) -> list[NDArray[np.float32]]:
        """See `Trainer.logprobs`."""
        self._policy.model.eval()
        mine: dict[int, NDArray[np.float32]] = {}
        with nullcontext() if adapter_enabled else adapters_disabled(self._policy.model):
            for indices, batch in self._batches(samples):
                mine |= by_sample(indices, self._passes.token_logprobs(batch, temperature)[0], samples)
        found = gather(mine, self._layout)
        return [found[index] for index in range(len(samples))]

    def forward_backward(self, samples: Sequence[TrainingSample], *, temperature: float) -> dict[str, float]:
        """See `Trainer.forward_backward`."""
        token_total, sequence_total = trained_totals(samples)
        self._policy.model.train()
        torch.manual_seed(derive_seed(self._config.seed, "dropout", self._updates, self._layout.rank))
        metrics: ObjectiveMetrics | None = None
        for _, batch in self._batches(samples):
            loss, part = self._passes.objective(
                batch, temperature, token_total=token_total, sequence_total=sequence_total
            )
            torch.autograd.backward(loss)
            metrics = part if metrics is None else metrics + part
        assert metrics is not None
        if self._layout.world_size > 1:
            reduce(metrics.sums, dist.ReduceOp.SUM)
            reduce(metrics.maxima, dist.ReduceOp.MAX)
        result = finalize_metrics(metrics.sums, metrics.maxima)
        self._refuse_unless_finite("loss", result["loss"])
        return result

    def optim_step(self) -> dict[str, float]:
        """See `Trainer.optim_step`."""
        settings = self._config.optimizer
        norm = nn.utils.clip_grad_norm_(self._policy.parameters.values(), settings.max_grad_norm)
        grad_norm = float(full_tensor(norm))
        self._refuse_unless_finite("gradient norm", grad_norm)
        total = self._config.steps * self._config.algorithm.updates_per_rollout
        rate = learning_rate(self._updates, total_updates=total, config=settings)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._updates += 1
        return {"grad_norm": grad_norm, "learning_rate": rate}

    def export_adapter(self) -> Payload:
        """See `Trainer.export_adapter`."""
        adapter = self._policy.adapter(version=self._updates)
        return Payload(adapter.info, adapter)

    def bucket_names(self, buffer_bytes: int) -> list[list[str]]:
        """See `Trainer.bucket_names`."""
        return self._policy.bucket_names(buffer_bytes)

    def export_weights(self, names: Sequence[str]) -> Bucket:
        """See `Trainer.export_weights`."""
        return self._policy.weights(names)

    def adapter_norms(self) -> dict[str, float]:
        """See `Trainer.adapter_norms`."""
        return self._policy.adapter_norms()

    def save(self, folder: Path) -> None:
        """See `Trainer.save`."""
        self.begin_save(folder)
        self.finish_save()

    def begin_save(self, folder: Path) -> None:
        """See `Trainer.begin_save`."""
        parameters, base = self._policy.parameters, self._saved_base()
        state = state_copy(parameters, self._optimizer, frozen=base, updates=self._updates)
        spec = self._policy.spec
        adapter = self._policy.adapter(version=self._updates, dtype=torch.float32) if spec else None

        def write() -> None:
            write_state(folder / "trainer", state, self._saving_group)
            if adapter and self._layout.rank == 0:
                path = self._config.model.path
                metadata = {"base_digest": model_digest(Path(path))}
                write_adapter(adapter, folder / "adapter", base_model=path, metadata=metadata)

        self._written = self._saving.submit(write)

    def finish_save(self) -> None:
        """See `Trainer.finish_save`."""
        written, self._written = self._written, None
        assert written is not None, "begin_save comes first"
        written.result()

    def load(self, folder: Path) -> None:
        """See `Trainer.load`."""
        self._updates = load_state(
            folder / "trainer", self._policy.parameters, self._optimizer, frozen=self._saved_base()
        )

    def start_from(self, folder: Path) -> None:
        """See `Trainer.start_from`."""
        assert self._policy.spec is not None, "lora.start_from needs an adapter"
        base = Path(self._config.model.path)
        self._policy.take(read_warm_start(folder, spec=self._policy.spec, modules=self._policy.modules, base=base))

    def release_memory(self) -> None:
        """See `Trainer.release_memory`."""
        torch.cuda.empty_cache()

    def close(self) -> None:
        """See `Trainer.close`."""
        self._saving.shutdown()
        if self._layout.world_size > 1:
            dist.destroy_process_group()

    def _saved_base(self) -> dict[str, nn.Parameter]:
        return {} if self._config.saves_lora_only else self._policy.frozen

    def _batches(self, samples: Sequence[TrainingSample]) -> list[tuple[list[int], PaddedBatch]]:
        return local_batches(samples, self._settings.micro_batch_tokens, self._layout, self._device)

    def _refuse_unless_finite(self, name: str, value: float) -> None:
        if not math.isfinite(value):
            self._optimizer.zero_grad(set_to_none=True)
            raise TrainerError(f"the {name} is {value} at policy version {self._updates}; no weight has changed")
