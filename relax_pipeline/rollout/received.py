"""Tensors that an engine's process fetches from the trainer's process, from whichever host."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from relax_pipeline.errors import EngineError
from relax_pipeline.rollout.block import Block, Place, num_bytes
from relax_pipeline.rollout.channel import RECEIVER, Backend, Channel
from relax_pipeline.rollout.device import DeviceTensors
from relax_pipeline.rollout.shared import SharedTensors


@dataclass(frozen=True, slots=True)
class Sender:
    """Where tensors are fetched from."""

    host: str
    control_port: int
    """Takes the numbers of the blocks that are wanted."""
    store_port: int
    """Where both ends of a channel meet."""
    key: bytes
    """Both ends show that they know it."""
    backend: Backend
    buffer_bytes: int
    """Most that is on a GPU on its way."""
    timeout: float
    """Seconds for each part."""


class ReceivedTensors(Mapping[str, torch.Tensor]):
    """A mapping from name to tensor that is passed by number and fetched, once, where it is read."""

    def __init__(self, sender: Sender, number: int, places: Mapping[str, Place]) -> None:
        self._sender, self._number, self._places = sender, number, dict(places)
        self._block: Block | None = None

    def fetch(self) -> Block:
        """Return the tensors in memory of this process's GPU; in the host's where they do not come by NCCL, or are more
        than `buffer_bytes`, which is the most that an engine's GPU holds of what it is sent.

        Raises:
            EngineError: The sender is gone, or did not send in time.
        """
        if self._block is None:
            block: Block
            if self._sender.backend == "nccl" and num_bytes(self._places) <= self._sender.buffer_bytes:
                block = DeviceTensors.allocate(self._places, torch.device("cuda"))
                content = block.whole()
            else:
                block, content = SharedTensors.allocate(self._places)
            _connection(self._sender).fetch(self._number, content)
            self._block = block
        return self._block

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.fetch()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __reduce__(self) -> tuple[type[ReceivedTensors], tuple[Sender, int, dict[str, Place]]]:
        return ReceivedTensors, (self._sender, self._number, self._places)


class _Connection:
    """This process's way to one sender; one block at a time."""

    def __init__(self, sender: Sender) -> None:
        self._sender, self._turn = sender, threading.Lock()
        if sender.backend == "nccl" and not torch.cuda.is_available():
            raise EngineError("sync.transport nccl: the trainer sends from a GPU, this engine's process sees none")
        self._control = Client((sender.host, sender.control_port), authkey=sender.key)
        name: str = self._control.recv()
        store = TCPStore(sender.host, sender.store_port, is_master=False, timeout=timedelta(seconds=sender.timeout))
        self._channel = Channel(
            PrefixStore(name, store),
            rank=RECEIVER,
            backend=sender.backend,
            buffer_bytes=sender.buffer_bytes,
            timeout=sender.timeout,
        )

    def fetch(self, number: int, block: torch.Tensor) -> None:
        try:
            with self._turn:
                self._control.send(number)
                refusal = self._control.recv()
                if refusal is None:
                    self._channel.receive(block)
        except (OSError, EOFError, RuntimeError) as error:
            _connections.pop(self._sender, None)
            raise EngineError(f"the trainer at {self._sender.host} broke off while it sent weights: {error}") from error
        if refusal is not None:
            raise EngineError(f"the trainer at {self._sender.host} sends no weights: {refusal}")


_connections: dict[Sender, _Connection] = {}
_meeting = threading.Lock()


def _connection(sender: Sender) -> _Connection:
    """Return the process's connection to a sender; meeting takes longer than sending."""
    with _meeting:
        if sender not in _connections:
            try:
                _connections[sender] = _Connection(sender)
            except (OSError, EOFError, RuntimeError, AuthenticationError) as error:
                where = f"{sender.host}:{sender.control_port}"
                raise EngineError(f"sync.transport nccl: the trainer cannot be reached at {where}: {error}") from error
        return _connections[sender]
