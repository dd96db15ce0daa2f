"""The penalty on completions that come near the length limit."""

from __future__ import annotations


def overlong_penalty(num_tokens: int, *, max_new_tokens: int, buffer_tokens: int, factor: float) -> float:
    """Return what to add to a reward: 0 up to max - buffer tokens, then linear down to -factor at max and beyond.

    Soft overlong punishment, Yu et al. 2025 (DAPO), equation 13.
    """
    excess = num_tokens - (max_new_tokens - buffer_tokens)
    return -factor * min(max(excess / buffer_tokens, 0.0), 1.0)
