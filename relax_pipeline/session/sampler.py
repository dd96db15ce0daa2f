"""Turn prompts into groups of completions, and score them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from relax_pipeline.rl.groups import RolloutGroup
from relax_pipeline.rollout.pool import EnginePool
from relax_pipeline.seeds import derive_seed
from relax_pipeline.trainer.base import Trainer
from relax_pipeline.types import Completion, GenerateRequest, Prompt, SamplingParams, Score, ScoreRequest

MorePrompts = Callable[[Mapping[int, RolloutGroup]], Sequence[Prompt]]
"""From groups that are complete, by their prompt's place, to further prompts."""


class Scores(Protocol):
    """Whoever scores completions."""

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Return one score a request, in order."""
        ...


class Sampler:
    """Turns prompts into scored groups: the one road for training and evaluation alike."""

    def __init__(
        self, *, pool: EnginePool, scorer: Scores, tokenizer: Any, heal: Callable[[], None], pinned: bool
    ) -> None:
        self._pool, self._scorer, self._tokenizer, self._heal = pool, scorer, tokenizer, heal
        self._pinned = pinned
        """All completions of a call come from one version. Merge mode cannot: its engines hold one version."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        num_completions: int,
        sampling: SamplingParams,
        seed: tuple[int | str, ...],
        more: MorePrompts = lambda _: (),
    ) -> list[RolloutGroup]:
        """Sample num_completions of each prompt, unscored. Seeds follow from `seed`, the prompt's place, the sample.

        Args:
            prompts: The first ones.
            num_completions: Of each.
            sampling: For all.
            seed: What tells this call from all others.
            more: Told of groups once they are complete, while others are sampled; the prompts that it returns have the
                next places.
        """
        groups = _Groups(self._tokenizer, num_completions, sampling, seed)

        def take(completions: Mapping[int, Completion]) -> list[GenerateRequest]:
            complete = groups.take(completions)
            return groups.ask(more(complete)) if complete else []

        version = self._pool.serving_version if self._pinned else None
        self._pool.generate(groups.ask(prompts), version=version, heal=self._heal, more=take)
        return [groups.complete[place] for place in sorted(groups.complete)]

    def engines_asleep(self, trainer: Trainer) -> AbstractContextManager[None]:
        """Return the block in which the engines give their GPUs to the trainer, as far as they are set to."""
        return self._pool.asleep(before_waking=trainer.release_memory)

    def score(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Return the groups with their scores."""
        requests = [
            ScoreRequest(group.prompt.text, text, group.prompt.label, group.prompt.metadata)
            for group in groups
            for text in group.texts
        ]
        scores = iter(self._scorer.score(requests))
        return [
            RolloutGroup(group.prompt, group.completions, group.texts, tuple(next(scores) for _ in group.texts))
            for group in groups
        ]


class _Groups:
    """Groups that fill up as their completions arrive.

    Attributes:
        complete: By their prompt's place.
    """

    def __init__(
        self, tokenizer: Any, num_completions: int, sampling: SamplingParams, seed: tuple[int | str, ...]
    ) -> None:
        self._tokenizer, self._size, self._sampling, self._seed = tokenizer, num_completions, sampling, seed
        self._prompts: list[Prompt] = []
        self._arrived: dict[int, dict[int, Completion]] = {}
        self.complete: dict[int, RolloutGroup] = {}

    def ask(self, prompts: Sequence[Prompt]) -> list[GenerateRequest]:
        """Return the requests for further prompts, one prompt's after the other's."""
        first = len(self._prompts)
        self._prompts += prompts
        return [
            GenerateRequest(prompt.token_ids, derive_seed(*self._seed, place, sample), self._sampling)
            for place, prompt in enumerate(prompts, first)
            for sample in range(self._size)
        ]

    def take(self, completions: Mapping[int, Completion]) -> dict[int, RolloutGroup]:
        """Return the groups that are complete with these completions, which are named by their request's place."""
        new = {}
        for number, completion in completions.items():
            place, sample = divmod(number, self._size)
            arrived = self._arrived.setdefault(place, {})
            arrived[sample] = completion
            if len(arrived) == self._size:
                new[place] = self._group(place, [arrived[sample] for sample in range(self._size)])
        self.complete |= new
        return new

    def _group(self, place: int, completions: Sequence[Completion]) -> RolloutGroup:
        ids = [completion.token_ids.tolist() for completion in completions]
        texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        return RolloutGroup(self._prompts[place], tuple(completions), tuple(texts), scores=())
