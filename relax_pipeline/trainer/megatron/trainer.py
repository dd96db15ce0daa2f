"""The Megatron trainer: one rank of it, behind the `Trainer` protocol."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from relax_pipeline.config import MegatronTrainerConfig, RunConfig
from relax_pipeline.errors import TrainerError
from relax_pipeline.models import resolve_device
from relax_pipeline.rl.batching import by_sample
from relax_pipeline.seeds import derive_seed
from relax_pipeline.trainer.base import Bucket, Payload, RankLayout, TrainerInfo
from relax_pipeline.trainer.megatron.batches import own_batches
from relax_pipeline.trainer.megatron.exports import Exports
from relax_pipeline.trainer.megatron.forward import Passes
from relax_pipeline.trainer.megatron.model import build_model
from relax_pipeline.trainer.megatron.optimizer import MasterOptimizer
from relax_pipeline.trainer.megatron.parallel import join, leave
from relax_pipeline.trainer.megatron.patches import runnable
from relax_pipeline.trainer.megatron.provider import uses_transformer_engine
from relax_pipeline.trainer.megatron.saving import Save
from relax_pipeline.trainer.megatron.state import load_state
from relax_pipeline.trainer.megatron.warm_start import load_adapter
from relax_pipeline.trainer.schedule import learning_rate
from relax_pipeline.trainer.totals import trained_totals
from relax_pipeline.types import TrainingSample


class MegatronTrainer:
    """Implements `Trainer`. Optimizer state and masters are float32; the model computes in the config's dtype."""

    def __init__(self, config: RunConfig, layout: RankLayout | None = None) -> None:
        assert isinstance(config.trainer, MegatronTrainerConfig)
        self._config, self._settings = config, config.trainer
        self._device = resolve_device(config.trainer.device)
        self._transformer_engine = uses_transformer_engine(self._settings, self._device)
        self._updates = 0
        self._save: Save | None = None
        with self._machine():
            self._ranks = join(layout or RankLayout(), self._settings, device=self._device, seed=config.seed)
            self._model = build_model(config, self._settings, self._ranks)
            self._optimizer = MasterOptimizer(self._model.parameters(), config.optimizer, self._ranks)
            self._passes = Passes(self._model, self._ranks)
            self._exports = Exports(config, self._model, self._optimizer, self._ranks)

    def info(self) -> TrainerInfo:
        """See `Trainer.info`."""
        return self._exports.info

    def policy_version(self) -> int:
        """See `Trainer.policy_version`."""
        return self._updates

    def logprobs(
        self, samples: Sequence[TrainingSample], *, temperature: float, adapter_enabled: bool = True
    ) -> list[NDArray[np.float32]]:
        """See `Trainer.logprobs`."""
        with self._machine(), nullcontext() if adapter_enabled else self._model.bare():
            batches = own_batches(samples, self._settings, self._ranks)
            logprobs = self._passes.logprobs([batch.packed for batch in batches], temperature)
        mine: dict[int, NDArray[np.float32]] = {}
        if self._ranks.answers:
            for batch, logprobs_BT in zip(batches, logprobs, strict=True):
                mine |= by_sample(batch.indices, logprobs_BT, samples)
        results = {index: values for part in self._ranks.gather(mine) for index, values in part.items()}
        return [results[index] for index in range(len(samples))]

    def forward_backward(self, samples: Sequence[TrainingSample], *, temperature: float) -> dict[str, float]:
        """See `Trainer.forward_backward`."""
        tokens, sequences = trained_totals(samples)
        algorithm = self._config.algorithm
        with self._machine():
            batches = [batch.packed for batch in own_batches(samples, self._settings, self._ranks)]
            if algorithm.kl_coef > 0:
                batches = self._passes.with_references(batches, temperature)
            torch.manual_seed(derive_seed(self._config.seed, "dropout", self._updates, self._ranks.groups.dp_cp.rank()))
            result = self._passes.train(batches, temperature, algorithm, token_total=tokens, sequence_total=sequences)
        self._refuse_unless_finite("loss", result["loss"])
        self._optimizer.accumulate()
        return result

    def optim_step(self) -> dict[str, float]:
        """See `Trainer.optim_step`."""
        total = self._config.steps * self._config.algorithm.updates_per_rollout
        rate = learning_rate(self._updates, total_updates=total, config=self._config.optimizer)
        with self._machine():
            grad_norm = self._optimizer.grad_norm()
            self._refuse_unless_finite("gradient norm", grad_norm)
            self._optimizer.step(rate=rate, grad_norm=grad_norm)
        self._updates += 1
        return {"grad_norm": grad_norm, "learning_rate": rate}

    def export_adapter(self) -> Payload:
        """See `Trainer.export_adapter`; the content is on rank 0."""
        with self._machine():
            return self._exports.adapter(self._updates)

    def bucket_names(self, buffer_bytes: int) -> list[list[str]]:
        """See `Trainer.bucket_names`."""
        return self._exports.bucket_names(buffer_bytes)

    def export_weights(self, names: Sequence[str]) -> Bucket:
        """See `Trainer.export_weights`; the content is on rank 0."""
        with self._machine():
            return self._exports.weights(names, self._updates)

    def adapter_norms(self) -> dict[str, float]:
        """See `Trainer.adapter_norms`; the norms are on rank 0."""
        with self._machine():
            return self._exports.norms(self._updates)

    def save(self, folder: Path) -> None:
        """See `Trainer.save`."""
        self.begin_save(folder)
        self.finish_save()

    def begin_save(self, folder: Path) -> None:
        """See `Trainer.begin_save`."""
        with self._machine():
            self._save = Save(
                folder / "trainer",
                self._model.chunks,
                self._optimizer,
                self._ranks,
                frozen={} if self._config.saves_lora_only else self._model.frozen(),
                updates=self._updates,
                write_adapter=self._exports.adapter_writer(folder / "adapter", self._updates),
            )

    def finish_save(self) -> None:
        """See `Trainer.finish_save`."""
        save, self._save = self._save, None
        assert save is not None, "begin_save comes first"
        with self._machine():
            save.finish()

    def load(self, folder: Path) -> None:
        """See `Trainer.load`."""
        with self._machine():
            self._updates = load_state(
                folder / "trainer",
                self._model.chunks,
                self._optimizer,
                self._ranks,
                frozen={} if self._config.saves_lora_only else self._model.frozen(),
            )
        self._exports.forget()

    def start_from(self, folder: Path) -> None:
        """See `Trainer.start_from`."""
        with self._machine():
            load_adapter(
                self._exports.read_warm_start(folder, self._updates), self._model, self._optimizer, self._ranks
            )
        self._exports.forget()

    def release_memory(self) -> None:
        """See `Trainer.release_memory`."""
        torch.cuda.empty_cache()

    def close(self) -> None:
        """See `Trainer.close`."""
        if self._save:
            self._save.wait()
        leave()

    def _machine(self) -> AbstractContextManager[None]:
        """Return the block in which Megatron runs on this machine."""
        return runnable(self._device, transformer_engine=self._transformer_engine)

    def _refuse_unless_finite(self, name: str, value: float) -> None:
        if not math.isfinite(value):
            self._optimizer.clear()
            raise TrainerError(f"the {name} is {value} at policy version {self._updates}; no weight has changed")
