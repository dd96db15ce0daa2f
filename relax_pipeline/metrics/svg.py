"""Curves as SVG text: nothing to install, readable on light and dark pages, in a file or inside HTML."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

Point = tuple[float, float]

# Okabe and Ito, "Color Universal Design" (2008), in the order that keeps neighbours furthest apart.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_DASHES = ("", "6 3", "2 3")
# The one grey with about the same contrast on white and on black; the page's own background shows through.
_INK = "#777777"
_LEFT, _RIGHT, _TOP, _LEGEND, _BOTTOM = 70, 16, 30, 20, 44
_CHAR_WIDTH = 6.6


@dataclass(frozen=True, slots=True)
class _Axis:
    """A linear scale from values to pixels."""

    ticks: tuple[float, ...]
    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)


def line_chart(
    series: Mapping[str, Sequence[Point]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    width: int = 720,
    height: int = 260,
) -> str:
    """Draw one line a series.

    Args:
        series: Names to (x, y). Points that are not finite interrupt their line.
        title: Above the chart, and what a screen reader says.
        x_label: Below the chart.
        y_label: Beside the chart.
        width: Pixels.
        height: Pixels.

    Returns:
        An <svg> element without style sheet or ids, so that several fit into one page.
    """
    finite = [point for points in series.values() for point in points if _is_finite(point)]
    top = _TOP + (_LEGEND if len(series) > 1 else 0)
    x_axis = _axis([x for x, _ in finite], _LEFT, width - _RIGHT, max_ticks=9, tight=True)
    y_axis = _axis([y for _, y in finite], height - _BOTTOM, top, max_ticks=6)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="12" fill="{_INK}">',
        _text(_LEFT, 18, title, 'font-size="14" font-weight="600"'),
        *(_y_tick(tick, y_axis, x_axis) for tick in y_axis.ticks),
        *(_x_tick(tick, x_axis, height - _BOTTOM) for tick in x_axis.ticks),
        _text((_LEFT + width - _RIGHT) / 2, height - 8, x_label, 'text-anchor="middle"'),
        _text(
            0,
            0,
            y_label,
            f'text-anchor="middle" transform="translate(12 {(top + height - _BOTTOM) / 2:g}) rotate(-90)"',
        ),
        *_legend(list(series) if len(series) > 1 else []),
        *(_line(points, *_style(index), x_axis, y_axis) for index, points in enumerate(series.values())),
    ]
    if not finite:
        parts.append(_text(width / 2, height / 2, "no values yet", 'text-anchor="middle"'))
    return "\n".join([*filter(None, parts), "</svg>"])


def nice_ticks(low: float, high: float, max_ticks: int) -> tuple[float, ...]:
    """Return the multiples of 1, 2 or 5 times a power of ten that enclose [low, high], at most `max_ticks` > 2."""
    power = 10.0 ** math.floor(math.log10((high - low) / (max_ticks - 1)))
    for step in (factor * power for factor in (1, 2, 5, 10, 20)):
        first, last = math.floor(round(low / step, 9)), math.ceil(round(high / step, 9))
        if last - first < max_ticks:
            break
    return tuple(float(f"{index * step:.12g}") for index in range(first, last + 1))


def _axis(values: Sequence[float], start: float, stop: float, *, max_ticks: int, tight: bool = False) -> _Axis:
    """An axis over the values, from first to last tick; tight: over the values only."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if math.isclose(low, high):
        margin = abs(low) / 10 or 0.5
        low, high = low - margin, high + margin
    ticks = nice_ticks(low, high, max_ticks)
    if tight:
        return _Axis(tuple(tick for tick in ticks if low <= tick <= high), low, high, start, stop)
    return _Axis(ticks, ticks[0], ticks[-1], start, stop)


def _line(points: Sequence[Point], colour: str, dash: str, x_axis: _Axis, y_axis: _Axis) -> str:
    """Consecutive finite points as polylines; a lone one as a dot."""
    pieces = []
    for finite, run in groupby(points, _is_finite):
        xy = [(f"{x_axis(x):.1f}", f"{y_axis(y):.1f}") for x, y in run] if finite else []
        if len(xy) == 1:
            pieces.append(f'<circle cx="{xy[0][0]}" cy="{xy[0][1]}" r="3" fill="{colour}"/>')
        elif xy:
            pieces.append(_polyline(" ".join(map(",".join, xy)), colour, dash))
    return "\n".join(pieces)


def _polyline(points: str, colour: str, dash: str) -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" '
        f'stroke-linejoin="round" stroke-linecap="round"{dashed}/>'
    )


def _style(index: int) -> tuple[str, str]:
    """Colour and dashes of the n-th series."""
    return _COLOURS[index % len(_COLOURS)], _DASHES[index // len(_COLOURS) % len(_DASHES)]


def _legend(names: Sequence[str]) -> list[str]:
    parts: list[str] = []
    x = float(_LEFT)
    for index, name in enumerate(names):
        parts.append(_polyline(f"{x:.1f},34 {x + 18:.1f},34", *_style(index)))
        parts.append(_text(x + 24, 38, name))
        x += 24 + len(name) * _CHAR_WIDTH + 16
    return parts


def _y_tick(tick: float, axis: _Axis, x_axis: _Axis) -> str:
    y = axis(tick)
    line = f'<path d="M{x_axis.start:g} {y:.1f}H{x_axis.stop:g}" stroke="{_INK}" stroke-opacity="0.25"/>'
    return line + _text(x_axis.start - 8, y + 4, f"{tick:.6g}", 'text-anchor="end"')


def _x_tick(tick: float, axis: _Axis, bottom: float) -> str:
    x = axis(tick)
    line = f'<path d="M{x:.1f} {bottom:g}v4" stroke="{_INK}"/>'
    return line + _text(x, bottom + 17, f"{tick:.6g}", 'text-anchor="middle"')


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}"{" " * bool(attributes)}{attributes}>{escape(text)}</text>'


def _is_finite(point: Point) -> bool:
    return math.isfinite(point[0]) and math.isfinite(point[1])
