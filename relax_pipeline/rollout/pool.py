"""Several engines behind one `generate`: work is dealt in fixed chunks, so a lost engine loses time, not samples.

An engine is given `streams` chunks side by side and takes the next whenever it has done one: the least loaded one is
dealt the most, and an engine that batches over calls stays full until the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal

from relax_pipeline.errors import EngineError
from relax_pipeline.rollout.base import Engine, EngineInfo
from relax_pipeline.rollout.deal import Deal, More, no_more
from relax_pipeline.rollout.gate import Gate
from relax_pipeline.types import Completion, GenerateRequest

NOT_SYNCED = "has not been synced yet"


@dataclass(slots=True)
class Slot:
    """A place for an engine, which may be lost and replaced."""

    index: int
    engine: Engine
    info: EngineInfo
    restarts_left: int
    failure: str | None = NOT_SYNCED
    """Why the engine is quarantined: it serves nothing until it is synced, or replaced and synced."""


class EnginePool:
    """All engines of a run.

    A call's requests are split into the same chunks however many engines are alive, and a chunk that fails is
    done again as it was. With engines whose output depends on the chunk only, results do not depend on failures.
    """

    def __init__(
        self, spawn: Callable[[int], Engine], *, replicas: int, restarts: int, chunk_size: int, streams: int = 1
    ) -> None:
        self._spawn = spawn
        self._chunk_size, self._streams = chunk_size, streams
        engines = [spawn(index) for index in range(replicas)]
        self.slots = [Slot(index, engine, engine.info(), restarts) for index, engine in enumerate(engines)]
        self.serving_version = -1
        self._gate = Gate()
        self._closed = False

    def ready(self) -> list[Slot]:
        """Return the slots whose engine may serve."""
        return [slot for slot in self.slots if slot.failure is None]

    def running(self) -> list[Slot]:
        """Return the slots whose engine runs, whether it may serve yet or not."""
        return [slot for slot in self.slots if slot.failure in (None, NOT_SYNCED)]

    def admit(self, slot: Slot) -> None:
        """Let a new engine serve, now that it is synced."""
        if slot.failure == NOT_SYNCED:
            slot.failure = None

    def quarantine(self, slot: Slot, reason: str) -> None:
        """Take an engine out of service."""
        slot.failure = reason

    def replace_lost(self) -> None:
        """Start new engines, side by side, in the slots that lost theirs and have restarts left."""
        self._refuse_if_closed()
        lost = [s for s in self.slots if s.failure not in (None, NOT_SYNCED) and s.restarts_left > 0]
        for slot in lost:
            slot.restarts_left -= 1
            slot.engine.close()
            slot.engine = self._spawn(slot.index)
        for slot in lost:
            try:
                slot.info = slot.engine.info()
                slot.failure = NOT_SYNCED
            except EngineError as error:
                slot.failure = str(error)

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        *,
        version: int | None,
        heal: Callable[[], None],
        more: More = no_more,
    ) -> list[Completion]:
        """Sample one completion a request.

        Args:
            requests: In order; neighbours share a chunk.
            version: Policy version to sample from; None: whichever is served when a chunk starts.
            heal: Called when no engine is left; brings at least one back, or raises.
            more: Told of completions as they arrive, by their request's place, while others are sampled; returns
                further requests, whose places follow in order.

        Raises:
            EngineError: No engine could be brought back, or the pool is closed.
        """
        deal = Deal(requests, min(self._chunk_size, -(-len(requests) // len(self.slots))))
        while not deal.is_done:
            self._refuse_if_closed()
            if not self.ready():
                heal()
            ready = self.ready()
            streams = min(self._streams, deal.begin())
            with ThreadPoolExecutor(max(1, len(ready) * streams)) as threads:
                work = [threads.submit(self._serve, slot, deal, version) for _ in range(streams) for slot in ready]
                deal.attend(len(work), more)
            for future in work:
                future.result()
        return deal.completions()

    def drained(self) -> AbstractContextManager[None]:
        """Hold back new chunks, wait for those in flight, and keep the engines idle inside this block."""
        return self._gate.closed()

    @contextmanager
    def asleep(self, *, before_waking: Callable[[], None]) -> Iterator[None]:
        """Let the engines free their GPUs' memory, as far as they are set to, inside this block.

        Args:
            before_waking: Gives back what was taken of that memory; not called where the block fails.
        """
        with self.drained():
            self._each("sleep")
            try:
                yield
                before_waking()
            finally:
                self._each("wake")

    def close(self) -> None:
        """Stop all engines, for good: what is being generated fails."""
        self._closed = True
        for slot in self.slots:
            slot.engine.close()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise EngineError("the engines were stopped: the run is being closed")

    def _each(self, method: Literal["sleep", "wake"]) -> None:
        """Call all engines that serve; one that fails is taken out of service."""
        for slot in self.ready():
            try:
                getattr(slot.engine, method)()
            except EngineError as error:
                self.quarantine(slot, str(error))

    def _serve(self, slot: Slot, deal: Deal, version: int | None) -> None:
        """Do chunks on one engine until there will be no more or the engine is lost."""
        engine = slot.engine
        try:
            for number, chunk in deal.stream():
                lost = slot.failure is not None or slot.engine is not engine
                completions = None if lost else self._sampled(slot, engine, chunk, version)
                if completions is None:
                    deal.give_back(number)
                    break
                deal.give(number, completions)
        except BaseException as error:
            deal.leave(error)
            raise
        deal.leave()

    def _sampled(
        self, slot: Slot, engine: Engine, chunk: Sequence[GenerateRequest], version: int | None
    ) -> list[Completion] | None:
        """Return an engine's completions; None if it is lost with them."""
        with self._gate.passed():
            wanted = self.serving_version if version is None else version
            try:
                completions = engine.generate(chunk, version=wanted)
            except EngineError as error:
                self._lose(slot, engine, str(error))
                return None
        served = {completion.policy_version for completion in completions}
        if served != {wanted} or len(completions) != len(chunk):
            self._lose(slot, engine, f"asked for version {wanted}, answered {len(completions)} samples of {served}")
            return None
        return completions

    def _lose(self, slot: Slot, engine: Engine, reason: str) -> None:
        """Quarantine an engine for its first failure; others follow from it, or come when it is already replaced."""
        if slot.engine is engine and slot.failure is None:
            self.quarantine(slot, reason)
