"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

_BLOCKS = "▁▂▃▄▅▆▇█"


def bytes_text(num_bytes: float) -> str:
    """Return bytes in the largest binary unit that leaves at least 1, e.g. 3.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"


def seconds_text(seconds: float) -> str:
    """Return a duration in its one or two largest units, e.g. 1 h 04 min, 0.117 s."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a line of at most `width` blocks, each the mean of its share of the values, from lowest to highest."""
    count = min(width, len(values))
    bounds = [index * len(values) // count for index in range(count + 1)] if count else []
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, span = min(means, default=0.0), max(means, default=0.0) - min(means, default=0.0)
    return "".join(_BLOCKS[round((mean - low) / span * 7) if span else 0] for mean in means)
