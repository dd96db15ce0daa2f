"""The curves of a run in bounded memory, however many steps it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax_pipeline.metrics.svg import Point


class History:
    """Points of each metric, thinned evenly: when there are too many, every second one goes."""

    def __init__(self, *, max_points: int = 400) -> None:
        self._max_points = max_points
        self._curves: dict[str, _Curve] = {}

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Take in a step's row. A metric need not be in every row."""
        for name, value in values.items():
            self._curves.setdefault(name, _Curve(self._max_points)).add((step, value))

    def rows(self) -> list[dict[str, Any]]:
        """Return rows as a StepLog does, by step, each with the metrics that still have a point there.

        The first and the newest point of every metric are always among them.
        """
        rows: dict[float, dict[str, Any]] = {}
        for name, curve in self._curves.items():
            for step, value in curve.all_points():
                rows.setdefault(step, {"step": step})[name] = value
        return [rows[step] for step in sorted(rows)]


class _Curve:
    def __init__(self, max_points: int) -> None:
        self._max_points = max_points
        self._points: list[Point] = []
        self._stride, self._measured = 1, 0
        self._newest: Point | None = None

    def add(self, point: Point) -> None:
        self._newest = point
        if self._measured % self._stride == 0:
            self._points.append(point)
        self._measured += 1
        if len(self._points) > self._max_points:
            self._points, self._stride = self._points[::2], 2 * self._stride

    def all_points(self) -> list[Point]:
        if self._newest is None or self._newest == self._points[-1]:
            return self._points
        return [*self._points, self._newest]
