"""Make rollouts: draw prompts, generate, score, drop groups without a gradient, draw again; ahead of the trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Protocol

from relax_pipeline.config import RolloutConfig
from relax_pipeline.data.stream import PromptStream
from relax_pipeline.rl.advantages import has_variance
from relax_pipeline.rl.groups import Rollout, RolloutGroup
from relax_pipeline.rollout.pool import EnginePool
from relax_pipeline.seeds import derive_seed
from relax_pipeline.types import (
    DataPosition,
    GenerateRequest,
    Prompt,
    SamplingParams,
    Score,
    ScoreRequest,
)


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
        self, prompts: Sequence[Prompt], *, num_completions: int, sampling: SamplingParams, seed: tuple[int | str, ...]
    ) -> list[RolloutGroup]:
        """Sample num_completions of each prompt, unscored. Seeds follow from `seed`, the prompt's place, the sample."""
        requests = [
            GenerateRequest(prompt.token_ids, derive_seed(*seed, place, sample), sampling)
            for place, prompt in enumerate(prompts)
            for sample in range(num_completions)
        ]
        version = self._pool.serving_version if self._pinned else None
        completions = self._pool.generate(requests, version=version, heal=self._heal)
        ids = [completion.token_ids.tolist() for completion in completions]
        texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        return [
            RolloutGroup(
                prompt=prompt,
                completions=tuple(completions[start : start + num_completions]),
                texts=tuple(texts[start : start + num_completions]),
                scores=(),
            )
            for start, prompt in zip(range(0, len(requests), num_completions), prompts, strict=True)
        ]

    def engines_asleep(self) -> AbstractContextManager[None]:
        """Return the block in which the engines give their GPUs to the trainer, as far as they are set to."""
        return self._pool.asleep()

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


class Collection:
    """One step's rollout in the making."""

    def __init__(self) -> None:
        self.generated: Future[int] = Future()
        """Number of completions of the first round."""
        self.scored: Future[Rollout] = Future()


class Collector:
    """Makes rollouts in step order on a thread of its own, so that they can run ahead of the trainer."""

    def __init__(
        self, *, sampler: Sampler, stream: PromptStream, config: RolloutConfig, sampling: SamplingParams, seed: int
    ) -> None:
        self._sampler, self._stream, self._config = sampler, stream, config
        self._sampling, self._seed = sampling, seed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        self._collections: dict[int, Collection] = {}

    def start(self, step: int) -> Collection:
        """Begin a step's rollout, unless it has begun; steps must be started in order."""
        if step not in self._collections:
            collection = self._collections[step] = Collection()
            self._thread.submit(self._run, step, collection)
        return self._collections[step]

    def finish(self, step: int, *, last: int) -> Rollout:
        """Wait for a step's rollout and hand it over; begin those that may run ahead, up to the run's last step."""
        rollout = self._collections.pop(step).scored.result()
        for ahead in range(step + 1, min(step + self._config.staleness, last) + 1):
            self.start(ahead)
        return rollout

    def close(self) -> None:
        """Drop what is queued; a call to an engine ends with the engine."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _run(self, step: int, collection: Collection) -> None:
        try:
            collection.scored.set_result(self._collect(step, collection))
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits, on another thread
            for future in (collection.generated, collection.scored):
                if not future.done():
                    future.set_exception(error)

    def _collect(self, step: int, collection: Collection) -> Rollout:
        kept: list[RolloutGroup] = []
        dropped: list[RolloutGroup] = []
        seconds = {"generate": 0.0, "score": 0.0}
        position = DataPosition()
        for attempt in range(1 + self._config.max_resample_rounds):
            prompts, position = self._stream.take(self._config.prompts_per_step - len(kept))
            started = time.perf_counter()
            unscored = self._sampler.generate(
                prompts,
                num_completions=self._config.completions_per_prompt,
                sampling=self._sampling,
                seed=(self._seed, "rollout", step, attempt),
            )
            generated = time.perf_counter()
            if not collection.generated.done():
                collection.generated.set_result(sum(len(group.completions) for group in unscored))
            for group in self._sampler.score(unscored):
                learns = not self._config.drop_zero_variance or has_variance(group.rewards)
                (kept if learns else dropped).append(group)
            seconds["generate"] += generated - started
            seconds["score"] += time.perf_counter() - generated
            if len(kept) == self._config.prompts_per_step:
                break
        return Rollout(step, tuple(kept), tuple(dropped), position, seconds)
