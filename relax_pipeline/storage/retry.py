"""Trying again, with growing random pauses, until a deadline."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 20.0

logger = logging.getLogger(__name__)


def retry(
    attempt: Callable[[], _T],
    *,
    errors: tuple[type[Exception], ...],
    is_transient: Callable[[Exception], bool],
    deadline_s: float,
) -> _T:
    """Return what the first attempt that succeeds returns.

    Pauses are drawn between 0 and a bound that doubles, so that many clients of a busy server spread out.

    Args:
        attempt: What to do; it is repeated whole.
        errors: What it may fail with.
        is_transient: Whether one of them may go away by itself.
        deadline_s: Seconds after the first failure in which attempts may start.

    Raises:
        Exception: The last attempt's own error, with a note how often it was tried.
    """
    tries = 0
    first_failure = None
    while True:
        try:
            return attempt()
        except errors as error:
            tries += 1
            now = time.monotonic()
            first_failure = now if first_failure is None else first_failure
            pause = random.uniform(0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**tries))
            if not is_transient(error):
                raise
            if now + pause > first_failure + deadline_s:
                error.add_note(f"tried {tries} times in {now - first_failure:.1f} s")
                raise
            logger.warning("%s; trying again in %.1f s", error, pause)
            time.sleep(pause)
