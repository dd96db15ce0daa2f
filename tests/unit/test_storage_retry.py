"""Trying again: what is repeated, for how long, and what remains of the failure."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from relax_pipeline.storage.retry import retry


def failing(times: int) -> Callable[[], int]:
    """Fails a number of times, then returns how often it was called."""
    calls = 0

    def attempt() -> int:
        nonlocal calls
        calls += 1
        if calls <= times:
            raise TimeoutError(f"attempt {calls}")
        return calls

    return attempt


def run(attempt: Callable[[], int], *, transient: bool = True, deadline_s: float = 5.0) -> int:
    return retry(attempt, errors=(TimeoutError,), is_transient=lambda error: transient, deadline_s=deadline_s)


def test_first_success_is_returned() -> None:
    assert run(failing(2)) == 3


def test_lasting_failure_is_not_repeated() -> None:
    with pytest.raises(TimeoutError, match="attempt 1"):
        run(failing(2), transient=False)


def test_deadline_ends_it_with_the_last_error_and_a_count() -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError) as caught:
        run(failing(1000), deadline_s=0.3)
    assert time.monotonic() - started < 0.5
    assert caught.value.__notes__[0].startswith("tried ")


def test_deadline_counts_from_the_first_failure() -> None:
    failing_once = failing(1)

    def slow() -> int:
        time.sleep(0.3)
        return failing_once()

    assert run(slow, deadline_s=0.25) == 2


def test_other_errors_pass_through() -> None:
    def attempt() -> int:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        run(attempt)
