from __future__ import annotations

import pytest

from relax_pipeline.errors import RewardError
from relax_pipeline.rewards.base import Scorer
from relax_pipeline.rewards.build import KINDS
from relax_pipeline.rewards.dapo import normalise
from relax_pipeline.rewards.deepscaler import last_boxed
from relax_pipeline.rewards.overlong import overlong_penalty
from relax_pipeline.types import Score, ScoreRequest


def score(scorer: Scorer, completion: str, label: str) -> Score:
    return scorer(ScoreRequest(prompt="a question", completion=completion, label=label))


def scores(kind: str, completion: str, label: str, **options: object) -> tuple[float, float | None]:
    """Value and accuracy."""
    result = score(KINDS[kind](**options), completion, label)
    return result.value, result.metrics.get("accuracy")


RIGHT, WRONG = (1.0, 1.0), (0.0, 0.0)


@pytest.mark.parametrize(
    ("completion", "label", "expected"),
    [
        ("42", "42", RIGHT),
        ("-3", "-3", RIGHT),
        ("-3", "3", WRONG),
        ("First 41, then one more. The answer is 42.", "42", RIGHT),
        (r"So \boxed{0.5}", "1/2", RIGHT),
        (r"$\frac{2}{4}$", r"\frac{1}{2}", RIGHT),
        (r"\boxed{42} and not 41", "42", RIGHT),
        (r"\boxed{41} or 42", "42", WRONG),
        ("1,000", "1000", RIGHT),
        ("34", "34.0", RIGHT),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", RIGHT),
        (r"\boxed{42}", r"\boxed{42}", RIGHT),
        ("", "42", WRONG),
        ("42", "", WRONG),
        ("no number", "42", WRONG),
        (r"\boxed{\frac{", "42", WRONG),
        ("(" * 2000, "42", WRONG),
        ("\x00\ud800", "42", WRONG),
        ("9" * 6000, "42", WRONG),
    ],
)
def test_math_compares_the_final_expression(completion: str, label: str, expected: tuple[float, float]) -> None:
    assert scores("math", completion, label) == expected


@pytest.mark.parametrize(
    ("completion", "label", "expected"),
    [
        ("Answer: 34", "34", (1.0, 1.0)),
        ("answer : $34$.", "34", (1.0, 1.0)),
        ("Answer: 33\nNo.\nANSWER:34", "34", (1.0, 1.0)),
        ("Answer: 34\nAnswer: 33", "34", (-1.0, 0.0)),
        ("Answer: x = 34", "34", (1.0, 1.0)),
        (r"Answer: \boxed{34}", "34", (1.0, 1.0)),
        ("Answer: 34 units", "34", (1.0, 1.0)),
        ("Answer: 12,345", "12345", (1.0, 1.0)),
        ("Answer: 34", "34.0", (1.0, 1.0)),
        ("Answer: 34.0", "34", (-1.0, 0.0)),
        ("Answer: 0", "0.5", (-1.0, 0.0)),
        ("Answer: 0.5", "0.5", (1.0, 1.0)),
        (r"Answer: $\frac12$", r"\frac{1}{2}", (1.0, 1.0)),
        ("Answer: x+1", "x+1", (1.0, 1.0)),
        ("Answer: 12345678901234567891", "12345678901234567891", (1.0, 1.0)),
        ("Answer: nan", "nan", (1.0, 1.0)),
        ("34", "34", (-1.0, 0.0)),
        ("Answer:", "34", (-1.0, 0.0)),
        ("", "34", (-1.0, 0.0)),
        ("", "", (-1.0, 0.0)),
        ("Answer: units", "", (-1.0, 0.0)),
    ],
)
def test_dapo_compares_the_last_answer_line(completion: str, label: str, expected: tuple[float, float]) -> None:
    assert scores("dapo", completion, label) == expected


@pytest.mark.parametrize(("gap", "value"), [(290, 1.0), (291, -1.0)])
def test_dapo_reads_the_last_300_characters(gap: int, value: float) -> None:
    assert scores("dapo", "Answer: 34" + "\n" * gap, "34")[0] == value


@pytest.mark.parametrize(
    ("answer", "normalised"),
    [
        ("a = b = 7", "7"),
        ("an apple", "apple"),
        (r"90^\circ", "90"),
        (r"\text{red}", "red"),
        (r"x\text{ and }y", "x,y"),
        (r"\textbf{B}", "B"),
        (r"\frac12 + \sqrt3", r"\frac{1}{2}+\sqrt{3}"),
        ("it is $5$ in all", "5"),
        (r"12\text{ dollars}", "12"),
        ("1,2,x", "1,2,x"),
    ],
)
def test_dapo_normalises(answer: str, normalised: str) -> None:
    assert normalise(answer) == normalised


@pytest.mark.parametrize(
    ("completion", "label", "expected"),
    [
        (r"hm</think>\boxed{42}", "42", RIGHT),
        (r"###Response \boxed{\frac{1}{2}}", "0.5", RIGHT),
        (r"\boxed{42}", "42", WRONG),
        (r"\boxed{42}</think>no box", "42", WRONG),
        (r"a</think>\boxed{42}</think>\boxed{41}", "42", WRONG),
        (r"</think>\boxed{41}, no, \boxed{42}", "42", RIGHT),
        (r"</think>\boxed{42", "42", WRONG),
        (r"</think>\boxed{}", "42", WRONG),
        (r"</think>\boxed{42}", "", WRONG),
        (r"</think>\boxed{42}", r"\boxed{42}", RIGHT),
        ("</think>42", "42", WRONG),
    ],
)
def test_deepscaler_wants_a_box_after_thinking(completion: str, label: str, expected: tuple[float, float]) -> None:
    assert scores("deepscaler", completion, label) == expected


@pytest.mark.parametrize(
    ("text", "content"),
    [(r"\boxed{\frac{1}{2}} }", r"\frac{1}{2}"), (r"\boxed{1} \boxed{2}", "2"), (r"\boxed{1", None), ("1}", None)],
)
def test_last_boxed_matches_braces(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("completion", "ignore_case", "expected"),
    [
        (" Paris\n", False, RIGHT),
        ("paris", False, WRONG),
        ("paris", True, RIGHT),
        ("<think>x</think>Paris", False, RIGHT),
    ],
)
def test_exact(completion: str, ignore_case: bool, expected: tuple[float, float]) -> None:
    assert scores("exact", completion, "Paris", ignore_case=ignore_case) == expected


@pytest.mark.parametrize(
    ("pattern", "completion", "expected"),
    [
        ("(?i)answer: (.*)", "Answer: 4\nanswer: 5 ", RIGHT),
        ("answer: (.*)", "answer: 5\nanswer: 4", WRONG),
        ("answer: (.*)", "5", WRONG),
        ("answer(: 5)?", "answer", WRONG),
        ("<think>", "<think>", (1.0, None)),
        ("<think>", "5", (0.0, None)),
    ],
)
def test_regex(pattern: str, completion: str, expected: tuple[float, float | None]) -> None:
    assert scores("regex", completion, "5", pattern=pattern) == expected


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("B", RIGHT),
        ("(B)", RIGHT),
        ("B. Because (A) is out.", RIGHT),
        ("The answer is (B).", RIGHT),
        ("**Answer: B**", RIGHT),
        ("Answer: **B**", RIGHT),
        (r"The answer is A. No: \boxed{\text{(B)}}", RIGHT),
        ("Answer: A\nAnswer: B", RIGHT),
        ("(A) is out, so I take (B)", RIGHT),
        ("Answer: A</think>Answer: B", RIGHT),
        ("Answer: A, since (B) is out", WRONG),
        ("Answer: Bread", WRONG),
        ("A train leaves at two, so B", WRONG),
        ("", WRONG),
    ],
)
@pytest.mark.parametrize("label", ["B", "(b)", "B."])
def test_multiple_choice_finds_the_letter(completion: str, label: str, expected: tuple[float, float]) -> None:
    assert scores("multiple_choice", completion, label) == expected


def test_multiple_choice_refuses_a_label_that_is_no_letter() -> None:
    with pytest.raises(RewardError, match="label '12' is not one letter"):
        scores("multiple_choice", "B", "12")


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("The Eiffel Tower!", RIGHT),
        ("tower eiffel", (1.0, 0.0)),
        ("the tower in Paris", (0.4, 0.0)),
        ("eiffel eiffel eiffel", (0.4, 0.0)),
        ("Louvre", WRONG),
        ("", WRONG),
    ],
)
def test_f1_counts_shared_words(completion: str, expected: tuple[float, float]) -> None:
    assert scores("f1", completion, "Eiffel tower") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(0, 0.0), (80, 0.0), (85, -0.5), (90, -1.0), (100, -2.0), (101, -2.0)]
)
def test_overlong_penalty_is_linear_over_the_buffer(num_tokens: int, penalty: float) -> None:
    assert overlong_penalty(num_tokens, max_new_tokens=100, buffer_tokens=20, factor=2.0) == penalty
