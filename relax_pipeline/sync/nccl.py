"""Between hosts, GPU to GPU: each engine fetches what it is sent, in parts of at most sync.buffer_bytes."""

from __future__ import annotations

import itertools
import secrets
import socket
import threading
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from relax_pipeline.rollout.block import Block
from relax_pipeline.rollout.channel import SENDER, Backend, Channel
from relax_pipeline.rollout.received import ReceivedTensors, Sender
from relax_pipeline.sync.blocks import Blocks
from relax_pipeline.types import Adapter


class Nccl:
    """Implements `Transport`. Serves every engine from a thread of its own, so a slow one holds up no other.

    Each engine has a group of two with the trainer, so one that is lost leaves the others' groups whole; what it costs
    is that the trainer sends as many times as there are engines.
    """

    def __init__(self, *, backend: Backend, buffer_bytes: int, timeout: float) -> None:
        """Listen for engines.

        Args:
            backend: nccl where trainer and engines have GPUs, of which no two are the same.
            buffer_bytes: Most that is on the way to an engine at once.
            timeout: Seconds for each part.
        """
        host = _own_address()
        key = secrets.token_bytes(16)
        self._listener = Listener((host, 0), authkey=key)
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
        port = int(self._listener.address[1])
        self._sender = Sender(host, port, self._store.port, key, backend, buffer_bytes, timeout)
        self._numbers = itertools.count()
        self._closed = False
        self._blocks = Blocks()
        self._numbered: dict[int, Block] = {}
        self._of_version: dict[int, list[int]] = {}
        threading.Thread(target=self._listen, daemon=True, name="nccl-listen").start()

    def adapter(self, adapter: Adapter) -> Adapter:
        """See `Transport.adapter`."""
        return replace(adapter, tensors=self.weights(adapter.tensors, version=adapter.info.version))

    def weights(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> Mapping[str, torch.Tensor]:
        """See `Transport.weights`."""
        number, block = next(self._numbers), self._blocks.pack(tensors, version=version)
        self._numbered[number] = block
        self._of_version.setdefault(version, []).append(number)
        return ReceivedTensors(self._sender, number, block.places)

    def forget(self, version: int) -> None:
        """See `Transport.forget`."""
        for number in self._of_version.pop(version, ()):
            del self._numbered[number]
        self._blocks.forget(version)

    def close(self) -> None:
        """See `Transport.close`."""
        self._closed = True
        self._listener.close()
        for version in list(self._of_version):
            self.forget(version)

    def _listen(self) -> None:
        for engine in itertools.count():
            try:
                control = self._listener.accept()
            except (AuthenticationError, OSError, EOFError):
                if self._closed:
                    return
                continue  # no engine of ours
            threading.Thread(target=self._serve, args=(control, f"engine-{engine}"), daemon=True).start()

    def _serve(self, control: Connection[Any, Any], name: str) -> None:
        """Send one engine what it asks for, until it goes."""
        try:
            control.send(name)
            channel = Channel(
                PrefixStore(name, self._store),
                rank=SENDER,
                backend=self._sender.backend,
                buffer_bytes=self._sender.buffer_bytes,
                timeout=self._sender.timeout,
            )
            while True:
                block = self._numbered.get(control.recv())
                control.send(None if block else "the version it asks for is too old")
                if block:
                    channel.send(block.whole())
        except (OSError, EOFError, RuntimeError):
            control.close()  # the engine's end says what happened


def _own_address() -> str:
    """Return the address at which other hosts reach this one; that of this host alone where it has no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: it asks which of our addresses would be used
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address
