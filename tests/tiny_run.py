"""Settings, samples and adapters for the tiny model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import PreTrainedModel

from relax_pipeline.config import RunConfig
from relax_pipeline.lora.adapter import make_adapter
from relax_pipeline.trainer.base import Trainer
from relax_pipeline.types import Adapter, AdapterSpec, Completion, GenerateRequest, TrainingSample

VOCABULARY = 80


def run_config(folder: Path, /, **sections: Mapping[str, Any] | int) -> RunConfig:
    """A float32 run with a rank-3 adapter on all linear layers; sections are merged into these."""
    values: dict[str, Any] = {
        "run_name": "tiny",
        "steps": 20,
        "model": {"path": str(folder), "dtype": "float32"},
        "lora": {"rank": 3, "alpha": 6},
        "data": {"train": {"path": "unused.jsonl"}},
        "sync": {"mode": "adapter"},
        "optimizer": {"learning_rate": 1e-2},
        "trainer": {"kind": "fsdp", "device": "cpu"},
        "engine": {"kind": "hf", "device": "cpu"},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section if isinstance(section, dict) else section
    return RunConfig.model_validate(values)


def make_samples(count: int, *, seed: int = 0) -> list[TrainingSample]:
    """Random sequences of 1 to 6 prompt and 1 to 9 completion tokens, of which about one in five does not train."""
    draw = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        length = int(draw.integers(1, 10))
        mask = draw.random(length) < 0.8
        mask[0] = True
        samples.append(
            TrainingSample(
                prompt_ids=draw.integers(4, VOCABULARY, int(draw.integers(1, 7))),
                completion_ids=draw.integers(4, VOCABULARY, length),
                loss_mask=mask,
                rollout_logprobs=-np.abs(draw.normal(4, 1, length)).astype(np.float32),
                advantage=float(draw.normal()),
                policy_version=0,
            )
        )
    return samples


def train(trainer: Trainer, *, updates: int, first: int = 0, count: int = 5) -> list[dict[str, float]]:
    """Take optimizer steps on samples that depend on the number of the step only."""
    metrics = []
    for update in range(first, first + updates):
        loss = trainer.forward_backward(make_samples(count, seed=update), temperature=1.0)
        metrics.append(loss | trainer.optim_step())
    return metrics


def assert_drawn_from(
    model: PreTrainedModel, batch: Sequence[GenerateRequest], completions: Sequence[Completion], *, tolerance: float
) -> None:
    """Each completion's rollout_logprobs are those of a teacher-forced pass at the sampling temperature."""
    for request, completion in zip(batch, completions, strict=True):
        sample = TrainingSample(
            prompt_ids=np.array(request.token_ids),
            completion_ids=completion.token_ids,
            loss_mask=np.ones(len(completion.token_ids), dtype=bool),
            rollout_logprobs=completion.rollout_logprobs,
            advantage=0.0,
            policy_version=completion.policy_version,
        )
        expected = reference_logprobs(model, sample, temperature=request.sampling.temperature or 1.0)
        np.testing.assert_allclose(completion.rollout_logprobs, expected, rtol=0, atol=tolerance)


def reference_logprobs(model: PreTrainedModel, sample: TrainingSample, *, temperature: float) -> np.ndarray:
    """One sequence, without padding, straight through transformers."""
    ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.completion_ids]))
    with torch.no_grad():
        logits_SV = model(ids[None]).logits[0, len(sample.prompt_ids) - 1 : -1].float() / temperature
    logprobs_SV = functional.log_softmax(logits_SV, dim=-1)
    return logprobs_SV.gather(-1, torch.from_numpy(sample.completion_ids)[:, None])[:, 0].numpy()


def random_adapter(
    modules: Sequence[str], shapes: Mapping[str, tuple[int, int]], *, version: int, rank: int = 3, scale: float = 0.3
) -> Adapter:
    """An adapter of random numbers for modules of shape (out, in)."""
    generator = torch.Generator().manual_seed(version)
    tensors = {}
    for module in modules:
        outside, inside = shapes[module]
        prefix = f"base_model.model.{module}"
        tensors[f"{prefix}.lora_A.weight"] = scale * torch.randn(rank, inside, generator=generator)
        tensors[f"{prefix}.lora_B.weight"] = scale * torch.randn(outside, rank, generator=generator)
    leaves = tuple(sorted({module.rpartition(".")[2] for module in modules}))
    return make_adapter(tensors, spec=AdapterSpec(rank, 2.0 * rank, leaves), version=version)


def with_logprobs(samples: Sequence[TrainingSample], logprobs: Sequence[np.ndarray]) -> list[TrainingSample]:
    """The samples as if an engine had drawn them with these logprobs."""
    return [replace(s, rollout_logprobs=values) for s, values in zip(samples, logprobs, strict=True)]
