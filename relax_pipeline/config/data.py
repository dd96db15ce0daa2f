"""Prompts, how completions are sampled from them, and how they are scored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from relax_pipeline.config.base import Section, advise


class PromptSource(Section):
    """A file or folder of prompts."""

    path: str
    """JSONL, Parquet, or a folder written by `datasets.save_to_disk`. Relative to the config file."""
    prompt_key: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages."""
    label_key: str = "label"
    """Column with the expected answer."""
    max_rows: Annotated[int, Field(ge=1)] | None = None
    """Use only the first rows."""


class DataConfig(Section):
    """Training prompts and how they are rendered."""

    train: PromptSource
    chat_template: bool = True
    """Wrap string prompts as a user message and apply the tokenizer's chat template."""
    system_prompt: str | None = None
    """System message put before each string prompt; needs chat_template."""
    max_prompt_tokens: Annotated[int, Field(ge=1)] = 1024
    """A longer prompt is an error that names its row."""
    shuffle: bool = True
    """Draw in an order that follows from (seed, epoch); off: in file order."""

    @model_validator(mode="after")
    def system_prompt_needs_chat_template(self) -> DataConfig:
        """Refuse a setting that would be ignored."""
        if self.system_prompt is not None and not self.chat_template:
            raise ValueError("system_prompt needs chat_template: set it to true, or write the text into the prompts")
        return self


class EvalConfig(Section):
    """Held-out evaluation, served by the same engines from the current policy."""

    source: PromptSource
    every: Annotated[int, Field(ge=0)] = 20
    """Steps between evaluations; 0: only before the first and after the last step."""
    completions_per_prompt: Annotated[int, Field(ge=1)] = 1
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: Annotated[int, Field(ge=1)] | None = None
    """None: as in training."""


class RolloutConfig(Section):
    """How much is sampled a step, and how."""

    prompts_per_step: Annotated[int, Field(ge=1)] = 16
    completions_per_prompt: Annotated[int, Field(ge=1)] = 8
    """The group size."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 1024
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Below 1 the sampling distribution is no longer the one the loss assumes."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """0 is off; above 0 the sampling distribution is no longer the one the loss assumes."""
    stop_token_ids: tuple[int, ...] = ()
    """Besides those of the model's generation config."""
    staleness: Annotated[int, Field(ge=0)] = 0
    """0: on-policy, each step waits for its own rollout. n: rollouts run up to n steps ahead of the trainer."""
    drop_zero_variance: bool = True
    """Leave out groups whose rewards are all equal: they carry no gradient."""
    max_resample_rounds: Annotated[int, Field(ge=0)] = 2
    """A step draws a new prompt for each dropped group, while others are sampled, up to this many times
    prompts_per_step; then it trains on what it has."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 1800
    """Deadline of one call to an engine."""

    @property
    def completions_per_step(self) -> int:
        """Without those of replaced groups."""
        return self.prompts_per_step * self.completions_per_prompt

    @property
    def versions_in_use(self) -> int:
        """Policy versions that rollouts may ask for at one time."""
        return self.staleness + 2

    @model_validator(mode="after")
    def sampling_is_what_the_loss_assumes(self) -> RolloutConfig:
        """Warn when tokens are not drawn from the distribution their logprobs belong to."""
        if self.top_p < 1 or self.top_k > 0:
            advise(
                f"rollout.top_p {self.top_p:g}, rollout.top_k {self.top_k}: tokens are drawn from a truncated "
                "distribution, their logprobs are of the whole one; train with top_p 1 and top_k 0"
            )
        return self


class ScorerConfig(Section):
    """One scorer and its weight in the reward."""

    kind: str = "math"
    """math, dapo, deepscaler, exact, regex, multiple_choice, f1, remote, or python:module.function."""
    weight: float = 1.0
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the scorer, e.g. {pattern: "answer: (.*)"} for regex, {url: ...} for remote."""

    @field_validator("kind")
    @classmethod
    def python_path_is_dotted(cls, kind: str) -> str:
        """Refuse `python:` without module.function; other names are checked where scorers are registered."""
        if kind.startswith("python:") and "." not in kind.removeprefix("python:"):
            raise ValueError(f"{kind!r}: write python:module.function")
        return kind


class OverlongConfig(Section):
    """What happens to completions that reach the length limit."""

    mode: Literal["off", "penalty", "filter"] = "off"
    """penalty: linear, over the last buffer_tokens before the limit, down to -factor. filter: no gradient from them."""
    buffer_tokens: Annotated[int, Field(ge=1)] = 512
    factor: Annotated[float, Field(ge=0)] = 1.0


class RewardsConfig(Section):
    """How completions are scored."""

    scorers: tuple[ScorerConfig, ...] = (ScorerConfig(),)
    """Summed by weight."""
    time_limit_seconds: Annotated[float, Field(gt=0)] = 10.0
    """Of one completion; over it the score is 0, and counted in reward/timed_out."""
    workers: Annotated[int, Field(ge=1)] = 2
    """Ray CPU workers that score in parallel."""
    overlong: OverlongConfig = OverlongConfig()

    @field_validator("scorers")
    @classmethod
    def has_a_scorer(cls, scorers: tuple[ScorerConfig, ...]) -> tuple[ScorerConfig, ...]:
        """Refuse an empty list: every reward would be 0."""
        if not scorers:
            raise ValueError("no scorers; name at least one, e.g. {kind: math}")
        return scorers
