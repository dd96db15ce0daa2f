"""One object in a process of its own: started, called with a deadline, killed, with its own errors raised here."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from relax_pipeline.errors import RelaxError


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs."""

    node_id: str
    gpu_ids: tuple[str, ...]
    """As CUDA_VISIBLE_DEVICES on that node names them; empty without GPUs."""


class _Host:
    """Builds an object and calls its methods by name. No logic of its own."""

    def __init__(self, gpu_ids: tuple[str, ...]) -> None:
        if gpu_ids:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_ids)
        self._target: Future[Any] = Future()

    def build(self, build: Callable[[], Any], num_threads: int | None) -> None:
        if num_threads is not None:
            import torch  # noqa: PLC0415 - takes seconds, and only a process that computes needs it

            torch.set_num_threads(num_threads)
        try:
            self._target.set_result(build())
        except Exception as error:  # noqa: BLE001 - raised by every call; Ray would only say that the actor died
            self._target.set_exception(error)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._target.result(), method)(*args, **kwargs)

    def split(self, method: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Call, and return the small part and the heavy `content` as two objects, so that the latter stays here."""
        result = getattr(self._target.result(), method)(*args, **kwargs)
        content = result.content
        object.__setattr__(result, "content", None)
        return result, content

    def pid(self) -> int:
        self._target.result()
        return os.getpid()

    def place(self) -> Place:
        return Place(ray.get_runtime_context().get_node_id(), tuple(map(str, ray.get_gpu_ids())))


class Host:
    """A handle on a hosted object."""

    def __init__(
        self,
        build: Callable[[], Any],
        *,
        name: str,
        error: type[RelaxError],
        num_threads: int | None = None,
        num_gpus: int = 0,
        guest_of: Place | None = None,
        concurrency: int = 1,
    ) -> None:
        """Start the process; `build` runs in it. Non-detached: it dies with this process, however that dies.

        Args:
            build: Makes the object; pickled to the process.
            name: For messages.
            error: Raised here when the process dies, hangs, or raises something that is not a RelaxError.
            num_threads: torch threads in the process; None for one that does not use torch.
            num_gpus: GPUs reserved for it.
            guest_of: Run where another process runs and use its GPUs too, instead of reserving any.
            concurrency: Calls that may run at once, each in a thread; the object must allow it.
        """
        self._name, self._error = name, error
        self._ended = False
        self._require_cluster()
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": num_gpus, "max_restarts": 0, "max_task_retries": 0}
        options["max_concurrency"] = concurrency
        if guest_of is not None:
            options |= {
                "num_gpus": 0,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(guest_of.node_id, soft=False),
            }
        gpu_ids = guest_of.gpu_ids if guest_of else ()
        self._actor: Any = ray.remote(_Host).options(**options).remote(gpu_ids)
        self._place = self._actor.place.remote()  # before what may take minutes: others wait to run beside it
        self._actor.build.remote(build, num_threads)

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Start a call; its result is got with `result`."""
        self._require_alive()
        return self._actor.call.remote(method, *args, **kwargs)

    def submit_split(self, method: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Start a call whose result has a `content`; the second handle may be passed to another host unopened."""
        self._require_alive()
        small, content = self._actor.split.options(num_returns=2).remote(method, *args, **kwargs)
        return small, content

    def result(self, reference: Any, *, timeout: float) -> Any:
        """Wait for a call.

        Raises:
            RelaxError: What the object raised; or this host's error if the process died or missed the deadline, in
                which case it is killed.
        """
        self._require_cluster()
        try:
            return ray.get(reference, timeout=timeout)
        except GetTimeoutError as error:
            self.kill()
            raise self._error(f"{self._name} gave no answer within {timeout:g} s and was killed") from error
        except RayTaskError as error:
            if isinstance(error.cause, RelaxError):
                raise error.cause from None
            raise self._error(f"{self._name} failed: {error}") from error
        except RayError as error:
            raise self._error(f"{self._name} died: {_reason(error)}") from error

    def call(self, method: str, *args: Any, timeout: float, **kwargs: Any) -> Any:
        """Call and wait; raises as `result`."""
        return self.result(self.submit(method, *args, **kwargs), timeout=timeout)

    def pid(self, *, timeout: float) -> int:
        """Return the process id, once the object is built; raises as `result`."""
        self._require_alive()
        pid: int = self.result(self._actor.pid.remote(), timeout=timeout)
        return pid

    def place(self, *, timeout: float) -> Place:
        """Return where the process runs, built or not; raises as `result`."""
        place: Place = self.result(self._place, timeout=timeout)
        return place

    def _require_cluster(self) -> None:
        if not ray.is_initialized():
            raise self._error(f"{self._name}: the run is over, and its Ray is gone")

    def _require_alive(self) -> None:
        """Refuse what a process might still answer while it is being ended."""
        self._require_cluster()
        if self._ended:
            raise self._error(f"{self._name} died: it was ended by this run")

    def kill(self) -> None:
        """End the process at once, if its cluster has not gone already and taken it along."""
        self._ended = True
        if ray.is_initialized():
            ray.kill(self._actor)


def put(value: Any) -> Any:
    """Place a value where all processes can read it, and return a handle that arrives as the value."""
    return ray.put(value)


def wait_any(references: Sequence[Any], *, timeout: float) -> list[Any]:
    """Return the references that are done, waiting for at least one until the timeout."""
    done, _ = ray.wait(list(references), num_returns=1, timeout=timeout)
    return list(done)


def _reason(error: Exception) -> str:
    """Return the line of Ray's account that says why: the first, or the last where it is a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1] if "creation task" in lines[0] else lines[0]
