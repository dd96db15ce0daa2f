"""The base model and the LoRA adapters put on it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from relax_pipeline.config.base import Section, advise

MEGATRON_TO_HF_MODULES: dict[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
    "router": ("gate",),
    "linear_q": ("q_proj",),
    "linear_k": ("k_proj",),
    "linear_v": ("v_proj",),
    "linear_fc1_gate": ("gate_proj",),
    "linear_fc1_up": ("up_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("kv_b_proj",),
    "linear_q_down_proj": ("q_a_proj",),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_q_proj": ("q_proj",),
    "in_proj": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    "out_proj": ("out_proj",),
}
"""Megatron's leaf names and the HF leaf names they stand for."""


def expand_target_modules(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the HF leaf names of Megatron target names, without repeats, in first-seen order."""
    return tuple(dict.fromkeys(leaf for name in names for leaf in MEGATRON_TO_HF_MODULES[name]))


class ModelConfig(Section):
    """The frozen base."""

    path: str
    """Folder of a Hugging Face checkpoint (config.json, *.safetensors, tokenizer). Relative to the config file."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute dtype. Adapters and optimizer state are float32 in both."""
    trust_remote_code: bool = False
    """Run Python code that lies in the model folder."""


class LoraConfig(Section):
    """The adapters: the only thing that trains while rank > 0."""

    rank: Annotated[int, Field(ge=0)] = 32
    """Inner size of each pair. 0 turns LoRA off: all weights train, and saves and syncs carry the whole model."""
    alpha: Annotated[float, Field(gt=0)] = 32
    """The delta is alpha / rank * B @ A."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """On the adapter's input in training. Above 0 the trainer's logprobs and the engine's no longer agree."""
    target_modules: tuple[str, ...] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    """Megatron names, also for the fsdp trainer."""
    scope: Literal["all", "language", "vision"] = "all"
    """Which region of a multimodal model gets adapters. Prompts are text so far: all means the language part, too."""
    start_from: str | None = None
    """Folder of a PEFT adapter of this rank, alpha, targets and base to start from; without it the policy starts as the
    base. A run that continues from a checkpoint does not read it. Relative to the config file."""

    @field_validator("target_modules")
    @classmethod
    def target_names_are_known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        """Refuse names outside the table, saying which are in it."""
        unknown = [name for name in names if name not in MEGATRON_TO_HF_MODULES]
        if unknown:
            raise ValueError(f"unknown target {unknown}; known Megatron names: {', '.join(MEGATRON_TO_HF_MODULES)}")
        if not names:
            raise ValueError("no target modules; name at least one, or set lora.rank to 0 to train all weights")
        return names

    @model_validator(mode="after")
    def scaling_is_moderate(self) -> LoraConfig:
        """Warn when the delta is scaled more than recipes that are known to learn."""
        if self.rank and self.alpha / self.rank > 4:
            advise(f"lora.alpha / lora.rank is {self.alpha / self.rank:g}; above 4 training tends to be unstable")
        return self

    @model_validator(mode="after")
    def start_needs_an_adapter(self) -> LoraConfig:
        """Without adapters there is nothing that could take over another's values."""
        if self.start_from is not None and not self.rank:
            raise ValueError("lora.start_from is set and lora.rank is 0: set lora.rank to the adapter's, or merge it")
        return self

    @property
    def enabled(self) -> bool:
        """Whether adapters train, rather than all weights."""
        return self.rank > 0

    @property
    def hf_target_modules(self) -> tuple[str, ...]:
        """The HF leaf names of the targets."""
        return expand_target_modules(self.target_modules)
