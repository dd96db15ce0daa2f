"""The work of one call to a pool: chunks of requests that streams take, give back done, or leave when they fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import TypeVar

from relax_pipeline.types import Completion, GenerateRequest

T = TypeVar("T")
More = Callable[[Mapping[int, Completion]], Sequence[GenerateRequest]]
"""From completions that have arrived, by their request's place, to further requests."""


def no_more(_: Mapping[int, Completion]) -> Sequence[GenerateRequest]:
    """Ask for nothing further."""
    return ()


class Deal:
    """Chunks that never change, and what has come back. Streams run on threads of their own, `attend` on the caller's.

    Further requests wait until they fill a chunk, or until nothing else is to be done: what a chunk holds depends on
    the requests alone, not on which chunk is done first.
    """

    def __init__(self, requests: Sequence[GenerateRequest], chunk_size: int) -> None:
        self._chunk_size = chunk_size
        self._chunks: list[Sequence[GenerateRequest]] = []
        self._firsts: list[int] = []
        """Place of each chunk's first request."""
        self._waiting: list[GenerateRequest] = []
        self._results: dict[int, list[Completion]] = {}
        self._told: set[int] = set()
        self._todo: SimpleQueue[int | None] = SimpleQueue()
        """Numbers of chunks; None: there will be no more."""
        self._news: SimpleQueue[int | BaseException | None] = SimpleQueue()
        """Numbers of chunks that are done; None or an error: a stream has ended."""
        for start in range(0, len(requests), chunk_size):
            self._add(requests[start : start + chunk_size])

    @property
    def is_done(self) -> bool:
        """Whether all chunks are done and told of."""
        return len(self._told) == len(self._chunks)

    def begin(self) -> int:
        """Lay out what is not done yet for new streams; return how many chunks that is."""
        left = [number for number in range(len(self._chunks)) if number not in self._results]
        self._todo = SimpleQueue()
        for number in left:
            self._todo.put(number)
        return len(left)

    def stream(self) -> Iterator[tuple[int, Sequence[GenerateRequest]]]:
        """Give this thread chunks, each with its number, until there will be no more."""
        for number in iter(self._todo.get, None):
            yield number, self._chunks[number]
        self._todo.put(None)  # for the next stream

    def give(self, number: int, completions: list[Completion]) -> None:
        """Hand over a chunk's completions."""
        self._results[number] = completions
        self._news.put(number)

    def give_back(self, number: int) -> None:
        """Leave a chunk to another stream."""
        self._todo.put(number)

    def leave(self, error: BaseException | None = None) -> None:
        """Say that a stream has ended, and why if it kept a chunk."""
        self._news.put(error)

    def attend(self, streams: int, more: More) -> None:
        """Tell `more` what arrives and lay out what it asks for, until all is done or all streams have ended.

        Raises:
            BaseException: What a stream left with.
        """
        try:
            while streams and not self.is_done:
                news = [self._news.get(), *_taken(self._news)]
                for error in news:
                    if isinstance(error, BaseException):
                        raise error
                streams -= news.count(None)
                arrived = [number for number in news if isinstance(number, int)]
                self._told.update(arrived)
                self._waiting += more(self._by_place(arrived)) if arrived else ()
                while len(self._waiting) >= self._chunk_size or (self._waiting and self.is_done):
                    self._todo.put(self._add(self._waiting[: self._chunk_size]))
                    del self._waiting[: self._chunk_size]
        finally:
            _taken(self._todo)  # what is left of them after an error
            self._todo.put(None)

    def completions(self) -> list[Completion]:
        """Return all completions, in the order of their requests."""
        return [completion for number in range(len(self._chunks)) for completion in self._results[number]]

    def _add(self, chunk: Sequence[GenerateRequest]) -> int:
        """Return the new chunk's number."""
        self._firsts.append(self._firsts[-1] + len(self._chunks[-1]) if self._chunks else 0)
        self._chunks.append(chunk)
        return len(self._chunks) - 1

    def _by_place(self, numbers: Sequence[int]) -> dict[int, Completion]:
        return {self._firsts[n] + offset: c for n in numbers for offset, c in enumerate(self._results[n])}


def _taken(queue: SimpleQueue[T]) -> list[T]:
    """Empty a queue; return what was in it."""
    items: list[T] = []
    try:
        while True:
            items.append(queue.get_nowait())
    except Empty:
        return items
