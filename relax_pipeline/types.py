"""The data that passes between the parts: prompts, completions, scores, training samples, adapters, acknowledgements.

Data only, importable without torch. Arrays are numpy, so that Ray moves them without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of the dataset, rendered and tokenised."""

    index: int
    """Row in the dataset, counted from 0."""
    text: str
    """What the model reads, chat template applied."""
    token_ids: tuple[int, ...]
    label: str
    """What the scorer compares with."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """All other columns of the row."""


@dataclass(frozen=True, slots=True)
class DataPosition:
    """How far a run has consumed its prompts: the next row is `order(seed, epoch)[offset]`."""

    epoch: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How an engine samples. A temperature of 0 is greedy."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One completion asked of an engine."""

    token_ids: tuple[int, ...]
    seed: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine sampled, stamped with who sampled it from which policy."""

    token_ids: NDArray[np.int64]
    """[T], the stop token included where one was sampled."""
    rollout_logprobs: NDArray[np.float32]
    """[T], nats, at the sampling temperature, before top-p and top-k."""
    finish_reason: FinishReason
    policy_version: int
    engine_id: str
    incarnation: str
    """Changes at every start of the engine."""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One completion to score."""

    prompt: str
    completion: str
    """Text without special tokens."""
    label: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Score:
    """What a scorer says of one completion."""

    value: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Parts worth plotting, e.g. `accuracy`."""
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One sequence to train on."""

    prompt_ids: NDArray[np.int64]
    """[P]"""
    completion_ids: NDArray[np.int64]
    """[T]"""
    loss_mask: NDArray[np.bool_]
    """[T], True on tokens that train."""
    rollout_logprobs: NDArray[np.float32]
    """[T]"""
    advantage: float
    """The same credit for each token of the completion."""
    policy_version: int
    policy_logprobs: NDArray[np.float32] | None = None
    """[T], under the policy at the start of the step; None: the policy now in the trainer, so the ratio is 1."""

    @property
    def num_tokens(self) -> int:
        """Prompt and completion tokens."""
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """The LoRA settings that decide what an adapter means."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    """HF leaf names, sorted."""
    dropout: float = 0.0

    @property
    def scaling(self) -> float:
        """alpha / rank, what B @ A is multiplied with."""
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class WeightsInfo:
    """What a set of tensors is, without the tensors: small enough for a log line."""

    version: int
    digest: str
    """`lora.fingerprint` of the tensors."""
    modules: tuple[str, ...]
    """Names of the adapted modules; of all tensors where the weights are a whole model."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Adapter:
    """LoRA tensors of one policy version, in HF-PEFT names."""

    info: WeightsInfo
    spec: AdapterSpec
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Ack:
    """What an engine says it holds after a sync.

    The digest is of the engine's own memory where it can be read back (hf), else of the memory that was handed to the
    server, once the server has confirmed the version's name (sglang). Only the probe shows what is served.
    """

    engine_id: str
    incarnation: str
    version: int
    digest: str
    modules: tuple[str, ...]
