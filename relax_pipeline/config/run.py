"""The whole configuration of a training run, and the rules that span its sections."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from relax_pipeline.config.algorithm import AlgorithmConfig, OptimizerConfig
from relax_pipeline.config.base import Section, advise
from relax_pipeline.config.cluster import ClusterConfig
from relax_pipeline.config.data import DataConfig, EvalConfig, RewardsConfig, RolloutConfig
from relax_pipeline.config.engine import EngineConfig, HfEngineConfig
from relax_pipeline.config.model import LoraConfig, ModelConfig
from relax_pipeline.config.storage import CheckpointConfig, PublishConfig, TrackingConfig
from relax_pipeline.config.sync import SyncConfig
from relax_pipeline.config.trainer import FsdpTrainerConfig, MegatronTrainerConfig, TrainerConfig


class RunConfig(Section):
    """Everything that decides a training run. The same model is the flow's parameter."""

    run_name: str
    """Names the run folder; the same name resumes it. Letters, digits, '.', '_' and '-'."""
    output_dir: str = "runs"
    """Holds one folder per run: checkpoints, metrics.jsonl, report.html, the merged model."""
    seed: Annotated[int, Field(ge=0)] = 0
    steps: Annotated[int, Field(ge=1)]
    """Rollouts to train on. Raising it later goes on from the last checkpoint."""
    model: ModelConfig
    lora: LoraConfig = LoraConfig()
    data: DataConfig
    evaluation: EvalConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    rewards: RewardsConfig = RewardsConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerConfig = FsdpTrainerConfig()
    engine: EngineConfig = HfEngineConfig()
    sync: SyncConfig = SyncConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    publish: PublishConfig = PublishConfig()
    cluster: ClusterConfig = ClusterConfig()
    tracking: TrackingConfig = TrackingConfig()

    @field_validator("run_name")
    @classmethod
    def run_name_is_a_folder_name(cls, name: str) -> str:
        """Refuse names that would leave the output folder or break artifact keys."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(f"{name!r}: start with a letter or digit; then letters, digits, '.', '_' and '-'")
        return name

    @model_validator(mode="after")
    def sync_mode_is_chosen(self) -> RunConfig:
        """Warn when merge mode is used because no mode was given."""
        if self.lora.enabled and "mode" not in self.sync.model_fields_set:
            advise("sync.mode is not set: merge sends the whole model each step, adapter mode only the adapters")
        return self

    @model_validator(mode="after")
    def full_training_syncs_merged(self) -> RunConfig:
        """Without adapters there is nothing to send but the whole model."""
        if not self.lora.enabled and self.sync.mode == "adapter":
            raise ValueError("sync.mode 'adapter' needs adapters: set lora.rank above 0, or sync.mode to merge")
        return self

    @model_validator(mode="after")
    def router_needs_adapter_mode(self) -> RunConfig:
        """A router adapter cannot be folded into the base."""
        if self.lora.enabled and "router" in self.lora.target_modules and self.sync.mode != "adapter":
            raise ValueError(
                "lora.target_modules holds 'router', whose adapter merge mode would drop: "
                "set sync.mode to adapter, or remove router"
            )
        return self

    @model_validator(mode="after")
    def adapter_mode_needs_single_data_parallel_engine(self) -> RunConfig:
        """Engines load adapters into one data-parallel replica only."""
        size = getattr(self.engine, "data_parallel_size", 1)
        if self.sync.mode == "adapter" and size != 1:
            raise ValueError(
                f"engine.data_parallel_size is {size}: an adapter would reach one replica only; "
                "set it to 1 and raise engine.replicas, or use sync.mode merge"
            )
        return self

    @model_validator(mode="after")
    def folding_experts_needs_whole_experts(self) -> RunConfig:
        """An expert's delta is folded where the expert lives, so the expert must not be split."""
        if isinstance(self.trainer, MegatronTrainerConfig) and self.trainer.expert_parallel_size > 1:
            size = self.trainer.expert_tensor_parallel_size
            if self.sync.mode == "merge" and self.lora.enabled and size != 1:
                raise ValueError(
                    f"trainer.expert_tensor_parallel_size is {size}: merge mode folds whole experts; set it to 1"
                )
        return self

    @model_validator(mode="after")
    def batch_divides_into_updates(self) -> RunConfig:
        """Each optimizer step of a rollout gets the same number of prompts."""
        prompts, updates = self.rollout.prompts_per_step, self.algorithm.updates_per_rollout
        if prompts % updates:
            raise ValueError(
                f"rollout.prompts_per_step {prompts} does not divide into algorithm.updates_per_rollout {updates}"
            )
        return self

    @model_validator(mode="after")
    def groups_can_be_compared(self) -> RunConfig:
        """A group baseline needs something to compare with."""
        if self.rollout.completions_per_prompt == 1 and self.algorithm.advantage != "reinforce_plus_plus":
            raise ValueError(
                f"algorithm.advantage {self.algorithm.advantage!r} compares the completions of one prompt, and "
                "rollout.completions_per_prompt is 1: raise it, or use reinforce_plus_plus"
            )
        return self

    @model_validator(mode="after")
    def colocated_adapters_stay_on_the_trainer_gpus(self) -> RunConfig:
        """Adapters pass through memory that trainer and engine share."""
        engines = self.engine.replicas * getattr(self.engine, "tensor_parallel_size", 1)
        if self.cluster.colocate and self.sync.mode == "adapter" and engines > self.trainer.world_size:
            raise ValueError(
                f"cluster.colocate: the engines need {engines} GPUs and the trainer has {self.trainer.world_size}, so "
                "adapters would not reach all engines: lower engine.replicas, set cluster.colocate to false, "
                "or sync.mode to merge"
            )
        return self

    @model_validator(mode="after")
    def penalty_fits_the_length_limit(self) -> RunConfig:
        """A buffer longer than a completion would punish every completion."""
        buffer, limit = self.rewards.overlong.buffer_tokens, self.rollout.max_new_tokens
        if self.rewards.overlong.mode == "penalty" and buffer > limit:
            raise ValueError(
                f"rewards.overlong.buffer_tokens {buffer} exceeds rollout.max_new_tokens {limit}: "
                "every completion would be punished; lower it"
            )
        return self

    @model_validator(mode="after")
    def kl_has_a_gradient(self) -> RunConfig:
        """Refuse a KL term that only adds noise: E[grad log p] is 0. Source: Schulman 2020, Approximating KL."""
        if self.algorithm.kl_coef > 0 and self.algorithm.kl_kind == "k1":
            raise ValueError(
                "algorithm.kl_kind 'k1' has an expected gradient of zero and holds no policy back: use k2 or k3"
            )
        return self

    @model_validator(mode="after")
    def clip_range_suits_sequences(self) -> RunConfig:
        """Warn when gspo gets a range meant for tokens. Source: Zheng et al. 2025, arXiv:2507.18071."""
        algorithm = self.algorithm
        if algorithm.loss == "gspo" and max(algorithm.clip_low, algorithm.clip_high) >= 0.1:
            advise(
                f"algorithm.clip_low {algorithm.clip_low:g} and clip_high {algorithm.clip_high:g} never clip a "
                "sequence ratio, a mean over tokens; the gspo paper uses 3e-4 and 4e-4"
            )
        return self

    @model_validator(mode="after")
    def rate_suits_adapters(self) -> RunConfig:
        """Warn when the rate looks copied from full fine-tuning."""
        rate = self.optimizer.learning_rate
        if self.lora.enabled and rate < 2e-6:
            advise(
                f"optimizer.learning_rate {rate:g} is a rate for full fine-tuning; "
                "LoRA under-trains below 2e-6, recipes use 1e-5 to 5e-5"
            )
        return self

    @model_validator(mode="after")
    def publishing_has_a_destination(self) -> RunConfig:
        """Asked to publish, know where to."""
        if self.publish.enabled and self.publish.destination is None:
            raise ValueError("publish.enabled needs publish.destination: file:///folder or s3://bucket/prefix")
        return self

    @property
    def longest_sequence(self) -> int:
        """Most tokens of a prompt and its completion."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def saves_lora_only(self) -> bool:
        """Whether checkpoints leave the base out."""
        return self.lora.enabled and self.checkpoint.save_lora_only

    def evaluates_at(self, step: int) -> bool:
        """Whether held-out prompts are answered after a step: every n-th, and the last."""
        if self.evaluation is None:
            return False
        return step == self.steps or (self.evaluation.every > 0 and step % self.evaluation.every == 0)

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint follows a step: every n-th, and the last."""
        return step == self.steps or step % self.checkpoint.every == 0
