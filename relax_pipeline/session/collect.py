"""Make rollouts: draw prompts, generate, score, drop groups without a gradient, draw others; ahead of the trainer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from relax_pipeline.config import RolloutConfig
from relax_pipeline.data.stream import PromptStream
from relax_pipeline.rl.advantages import has_variance
from relax_pipeline.rl.groups import Rollout, RolloutGroup
from relax_pipeline.session.sampler import Sampler
from relax_pipeline.types import Prompt, SamplingParams


class Collection:
    """One step's rollout in the making."""

    def __init__(self) -> None:
        self.generated: Future[int] = Future()
        """Number of completions of the step's first prompts; others are drawn for groups that are dropped."""
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
        """Sample, score while others are sampled, and draw a new prompt for each group that is dropped.

        Which prompts are drawn, and their seeds, depend on rewards alone and not on which group is done first.
        """
        wanted, started = self._config.prompts_per_step, time.perf_counter()
        prompts, position = self._stream.take(wanted)
        groups: dict[int, RolloutGroup] = {}
        seconds = {"generate": 0.0, "score": 0.0}
        room = wanted * self._config.max_resample_rounds

        def judge(complete: Mapping[int, RolloutGroup]) -> Sequence[Prompt]:
            nonlocal position, room
            seconds["generate"] = (arrived := time.perf_counter()) - started
            if not collection.generated.done() and set(range(wanted)) <= {*groups, *complete}:
                collection.generated.set_result(wanted * self._config.completions_per_prompt)
            scored = self._sampler.score(list(complete.values()))
            groups.update(zip(complete, scored, strict=True))
            seconds["score"] += time.perf_counter() - arrived
            missing = min(room, sum(not self._learns(group) for group in scored))
            room -= missing
            further, position = self._stream.take(missing) if missing else ((), position)
            return further

        self._sampler.generate(
            prompts,
            num_completions=self._config.completions_per_prompt,
            sampling=self._sampling,
            seed=(self._seed, "rollout", step),
            more=judge,
        )
        drawn = [groups[place] for place in sorted(groups)]
        kept, dropped = (tuple(g for g in drawn if self._learns(g) is learns) for learns in (True, False))
        return Rollout(step, kept, dropped, position, seconds)

    def _learns(self, group: RolloutGroup) -> bool:
        return not self._config.drop_zero_variance or has_variance(group.rewards)
