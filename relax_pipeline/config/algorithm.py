"""The reinforcement-learning objective and the optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from relax_pipeline.config.base import Section


class AlgorithmConfig(Section):
    """From rewards to a loss. The defaults are group-relative, token-level, clip-higher, without KL."""

    advantage: Literal["group", "group_std", "rloo", "reinforce_plus_plus"] = "group"
    """group: reward - group mean. group_std: divided by the group's standard deviation as well."""
    loss: Literal["clip", "gspo", "cispo"] = "clip"
    """clip: token ratio (PPO). gspo: sequence ratio. cispo: clipped, detached importance weight."""
    aggregation: Literal["token", "sequence"] = "token"
    """token: mean over all trained tokens of the step. sequence: mean over sequences of their token means."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Upper bound on the loss of tokens with negative advantage, as a multiple of it; clip only."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL to the base. The reference is the same model with its adapter off: no second copy."""
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    importance_sampling: Literal["off", "token_truncate", "sequence_mask"] = "token_truncate"
    """Corrects for engine and trainer logprobs that differ: truncate each token's weight, or drop whole sequences."""
    importance_cap: Annotated[float, Field(gt=1)] = 2.0
    updates_per_rollout: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps a rollout is split into."""

    @model_validator(mode="after")
    def dual_clip_needs_clip(self) -> AlgorithmConfig:
        """Refuse a setting that would be ignored."""
        if self.dual_clip is not None and self.loss != "clip":
            raise ValueError(f"dual_clip works with loss 'clip', not {self.loss!r}; remove it or change the loss")
        return self


class OptimizerConfig(Section):
    """AdamW over the trained parameters."""

    learning_rate: Annotated[float, Field(gt=0)] = 2e-5
    schedule: Literal["constant", "cosine"] = "constant"
    """After the warm-up; cosine falls to a tenth at the last step."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Linear, the first step already trains."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.98
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
