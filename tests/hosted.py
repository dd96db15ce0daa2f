"""Objects that tests put into processes of their own; importable there by name."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import deque
from itertools import repeat
from typing import Any

from relax_pipeline.errors import AdapterError, UnknownVersionError
from relax_pipeline.types import ScoreRequest


class Misbehaving:
    """Does what it is told; the group of ranks it stands for fails in the same ways."""

    def __init__(self, rank: int = 0, fault: str = "none") -> None:
        self.rank, self.fault = rank, fault
        if fault == "build":
            raise AdapterError("cannot be built")

    def info(self) -> tuple[int, int]:
        """Ask for an answer."""
        return self.rank, os.getpid()

    def visible_gpus(self) -> str | None:
        """Return what CUDA would be allowed to use."""
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    def echo(self, value: Any) -> Any:
        """Return what was given."""
        return value

    def refuse(self) -> None:
        """Raise an error of this software."""
        raise UnknownVersionError("holds policy versions [1], not 2")

    def stumble(self) -> None:
        """Raise an error of another kind."""
        raise KeyError("weight")

    def tell(self) -> None:
        """Log of one's own and of others."""
        logging.getLogger("relax_pipeline.trainer").info("step 3\nof 5")
        logging.getLogger("relax_pipeline.trainer").debug("not of interest")
        logging.getLogger("megatron.core").info("not of interest")
        logging.getLogger("megatron.core").error("rank 1 is late")

    def wait(self, seconds: float) -> str:
        """Take a while."""
        time.sleep(seconds)
        return "done"

    def die(self) -> None:
        """End the process as the kernel would."""
        os.kill(os.getpid(), signal.SIGKILL)

    def optim_step(self) -> dict[str, float]:
        """Fail as told; else wait, as a rank does in a collective whose peer is gone."""
        match self.fault:
            case "raise":
                raise AdapterError("this rank's adapter is broken")
            case "bug":
                raise KeyError("weight")
            case "die":
                self.die()
            case "lost":
                raise RuntimeError("Connection closed by peer")
            case "late":
                time.sleep(1)
                raise AdapterError("this rank's adapter is broken")
            case "answer":
                return {"rank": float(self.rank)}
        time.sleep(60)
        return {}


def scripted(request: ScoreRequest) -> float:
    """Score by the completion: a number, an endless loop, or C code that no signal interrupts."""
    if request.completion == "loop":
        while True:
            pass
    if request.completion == "stuck":
        deque(repeat(None), maxlen=0)
    if request.completion == "crash":
        os._exit(1)
    return float(request.completion)


def leisurely(request: ScoreRequest) -> float:
    """Count digits, and leave the CPU to others for a while."""
    time.sleep(0.03)
    return float(sum(map(str.isdigit, request.completion)))
