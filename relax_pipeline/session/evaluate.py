"""Held-out evaluation: how well the policy that the engines serve answers prompts it is not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relax_pipeline.session.sampler import Sampler
from relax_pipeline.types import Prompt, SamplingParams


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out prompts and how they are answered."""

    prompts: Sequence[Prompt]
    num_completions: int
    sampling: SamplingParams


def answer_held_out(sampler: Sampler, evaluation: Evaluation, *, seed: int) -> dict[str, float]:
    """Answer and score the prompts; return the means as `eval/...`, and the version that answered."""
    groups = sampler.generate(
        evaluation.prompts,
        num_completions=evaluation.num_completions,
        sampling=evaluation.sampling,
        seed=(seed, "evaluation"),
    )
    scores = [score for group in sampler.score(groups) for score in group.scores]
    names = dict.fromkeys(name for score in scores for name in score.metrics)
    metrics = {f"eval/{n}": float(np.mean([s.metrics[n] for s in scores if n in s.metrics])) for n in names}
    metrics["eval/reward"] = float(np.mean([score.value for score in scores]))
    metrics["eval/policy_version"] = float(groups[0].completions[0].policy_version)
    return metrics
