"""A group of Megatron ranks in processes forked from one that has imported Megatron already, called as one trainer."""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import pytest

from relax_pipeline.config import RunConfig
from relax_pipeline.errors import RelaxError
from relax_pipeline.trainer.base import RankLayout, Trainer

_SECONDS = 120.0


class RankGroup:
    """Sends each call to all ranks and returns rank 0's answer, or raises the first rank's error."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["relax_pipeline.trainer.megatron"])
        self._processes, self._pipes = [], []
        world_size, meeting = config.trainer.world_size, f"file://{folder / uuid4().hex}"
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            layout = RankLayout(rank, world_size, meeting)
            process = context.Process(target=_serve, args=(theirs, config, layout), daemon=True)
            with pytest.MonkeyPatch.context() as patch:  # for the process that is forked, which the first one starts
                patch.setenv("OMP_NUM_THREADS", "1")
                process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        try:
            self._answers()  # the trainers are built
        except BaseException:
            self.end()
            raise

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of all ranks and return their answers, in rank order."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((method, args, kwargs)))
        return self._answers()

    def __getattr__(self, method: str) -> Any:
        return lambda *args, **kwargs: self.call(method, *args, **kwargs)[0]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def _answers(self) -> list[Any]:
        answers: dict[int, Any] = {}
        while len(answers) < len(self._pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait(list(waiting), timeout=_SECONDS)
            if not ready:
                self.end()
                raise TimeoutError(f"ranks {list(waiting.values())} gave no answer within {_SECONDS} s")
            for pipe in ready:
                answer = pickle.loads(cast(Connection, pipe).recv_bytes())
                answers[waiting[pipe]] = answer
                if isinstance(answer, _Crash):
                    self.end()
                    raise AssertionError(f"rank {waiting[pipe]}:\n{answer.text}")
        for rank in sorted(answers):
            if isinstance(answers[rank], RelaxError):
                raise answers[rank]
        return [answers[rank] for rank in sorted(answers)]


@contextmanager
def rank_group(config: RunConfig, folder: Path) -> Iterator[Trainer]:
    """A group of ranks as a trainer, ended with the block."""
    group = RankGroup(config, folder)
    try:
        yield cast(Trainer, group)
    finally:
        group.end()


class _Crash:
    def __init__(self, text: str) -> None:
        self.text = text


def _serve(pipe: Connection, config: RunConfig, layout: RankLayout) -> None:
    import torch

    from relax_pipeline.trainer.megatron import MegatronTrainer

    torch.set_num_threads(1)
    trainer: Any = None

    def answer(method: str, args: Any, kwargs: Any) -> Any:
        nonlocal trainer
        if method == "__init__":
            trainer = MegatronTrainer(config, layout)
            return None
        return getattr(trainer, method)(*args, **kwargs)

    call: Any = ("__init__", (), {})
    while True:
        try:
            result = answer(*call)
        except RelaxError as error:
            result = error
        except BaseException:  # noqa: BLE001 - told to the test
            result = _Crash(traceback.format_exc())
        pipe.send_bytes(pickle.dumps(result))
        call = pickle.loads(pipe.recv_bytes())
