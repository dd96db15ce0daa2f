"""Scorer `dapo`: the text after the last "Answer:" equals the label once both are normalised."""

from __future__ import annotations

import re

from pydantic.dataclasses import dataclass

from relax_pipeline.rewards.base import OPTIONS, right_or_wrong
from relax_pipeline.types import Score, ScoreRequest

TAIL_CHARACTERS = 300
"""Only the end of a completion is searched."""
_ANSWER = re.compile(r"Answer\s*:\s*([^\n]+)", re.IGNORECASE)

_REPLACED = {
    "an ": "",
    "a ": "",
    ".$": "$",
    r"\$": "",
    r"\ ": "",
    " ": "",
    "mbox": "text",
    r",\text{and}": ",",
    r"\text{and}": ",",
    r"\text{m}": r"\text{}",
}
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "ft", "hours", "km", "units", r"\ldots", "sue"),
    *("points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges"),
    *("students", "childrentickets", "multiples"),
    *(r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}", r"\text{}"),
    *(r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
_REWRITTEN = {
    r".*?\$(.*?)\$.*": r"\1",
    r"\\(?:text|textbf|overline)\{(.*?)\}": r"\1",
    r"\\boxed\{(.*)\}": r"\1",
    r"frac([^{])(.)": r"frac{\1}{\2}",
    r"sqrt([^{])": r"sqrt{\1}",
}


def normalise(answer: str) -> str:
    """Return an answer without its left-hand side, units, spaces and LaTeX dressing.

    The rules, in this order, are those of Lewkowycz et al. 2022, appendix D, in the variant DAPO is scored with.
    """
    answer = answer.rpartition("=")[2]
    for old, new in _REPLACED.items():
        answer = answer.replace(old, new)
    for old in _REMOVED:
        answer = answer.replace(old, "")
    for pattern, new in _REWRITTEN.items():
        answer = re.sub(pattern, new, answer)
    answer = answer.replace("$", "").strip()
    without_commas = answer.replace(",", "")
    return without_commas if without_commas.isdigit() else answer


def expected_answer(label: str) -> str:
    """Return the normalised label, whole numbers without a fraction ("34.0" is "34"); other labels stay text."""
    answer = normalise(label)
    try:
        number = float(answer)
    except ValueError:
        return answer
    exact = number.is_integer() and abs(number) < 2**53
    return str(int(number)) if exact else answer


@dataclass(frozen=True, config=OPTIONS)
class DapoScorer:
    """1 where the answer equals the label, else -1."""

    def __call__(self, request: ScoreRequest) -> Score:
        """Score one completion."""
        answers = _ANSWER.findall(request.completion[-TAIL_CHARACTERS:])
        answer = normalise(answers[-1]) if answers else ""
        return right_or_wrong(answer != "" and answer == expected_answer(request.label), wrong=-1.0)
