"""Curves: ticks at round numbers, points where they belong, gaps where values are missing."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from relax_pipeline.metrics.svg import line_chart, nice_ticks


def draw(**series: list[tuple[float, float]]) -> str:
    return line_chart(series, title="Reward", x_label="step", y_label="mean", width=500, height=300)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)),
        (0.13, 0.81, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)),
        (-3.0, 7.0, (-5.0, 0.0, 5.0, 10.0)),
        (0.0002, 0.0009, (0.0002, 0.0004, 0.0006, 0.0008, 0.001)),
        (1000.0, 51000.0, (0.0, 20000.0, 40000.0, 60000.0)),
    ],
)
def test_ticks_are_round_and_enclose(low: float, high: float, expected: tuple[float, ...]) -> None:
    assert nice_ticks(low, high, 6) == expected


def test_corners_of_the_data_lie_on_the_corners_of_the_plot() -> None:
    # x: 70 to 500 - 16; y: 300 - 44 up to 30, as one series has no legend.
    assert 'points="70.0,256.0 484.0,30.0"' in draw(reward=[(1, 0.0), (3, 1.0)])


def test_missing_value_interrupts_the_line() -> None:
    text = draw(reward=[(0, 0.0), (1, 1.0), (2, math.nan), (3, 1.0), (4, 0.0)])
    assert len(re.findall("<polyline", text)) == 2
    assert "nan" not in text


def test_lone_point_is_a_dot() -> None:
    assert 'cx="277.0" cy="143.0"' in draw(reward=[(5, 2.0)])


def test_without_values_it_says_so() -> None:
    assert "no values yet" in draw()
    assert "no values yet" in draw(reward=[(0, math.inf)])


def test_several_series_have_a_legend_and_their_own_looks() -> None:
    text = draw(**{f"s{number}": [(0, 0.0), (1, float(number))] for number in range(8)})
    looks = re.findall(r'stroke="(#\w+)"[^>]*?(?:stroke-dasharray="([\d ]+)")?/>', text)
    lines = [look for look in looks if look[0] != "#777777"]
    assert len(lines) == 16
    assert len(set(lines)) == 8
    assert ">s7</text>" in text


def test_text_is_escaped_and_the_svg_well_formed() -> None:
    text = line_chart({"a<b": [(0, 1.0)], "c&d": [(0, 2.0)]}, title='"x" & <y>', x_label="<", y_label="&")
    root = ElementTree.fromstring(text)
    assert root.get("aria-label") == '"x" & <y>'
    assert "a<b" in [element.text for element in root]


def test_ticks_of_tiny_values_stay_apart() -> None:
    assert nice_ticks(1e-13, 4e-13, 4) == (1e-13, 2e-13, 3e-13, 4e-13)


def test_values_that_differ_by_rounding_only_make_a_flat_line() -> None:
    assert 'points="70.0,143.0 484.0,143.0"' in draw(reward=[(1, 1.0), (2, 1.0000000000000002)])
