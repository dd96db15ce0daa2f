"""Makes one-step arithmetic word problems: prompts for small real models, without a download."""

from __future__ import annotations

import random
from itertools import product
from typing import TypedDict

from relax_pipeline.errors import DataError

NAMES = ("Ana", "Ben", "Chloe", "Dev", "Ella", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kofi", "Lena")
OBJECTS = ("apples", "books", "coins", "marbles", "pencils", "stickers", "shells", "stamps", "cookies", "buttons")
SUMS = (
    "{name} has {a} {objects} and gets {b} more. How many {objects} does {name} have now?",
    "{name} finds {a} {objects} in the morning and {b} {objects} in the evening. How many {objects} is that in total?",
)
DIFFERENCES = (
    "{name} has {a} {objects} and gives away {b}. How many {objects} does {name} have left?",
    "There are {a} {objects} on the table. {name} takes {b} of them. How many {objects} are still on the table?",
)
PRODUCTS = (
    "{name} has {a} bags with {b} {objects} in each. How many {objects} does {name} have in total?",
    "{name} buys {b} {objects} every day for {a} days. How many {objects} does {name} buy in total?",
)
INSTRUCTION = 'Solve the problem with one calculation. End with "Answer: " and the number.'
EXAMPLES = (
    ("Sam has 3 pens and gets 4 more. How many pens does Sam have now?", "3 + 4 = 7. Answer: 7"),
    ("Mia has 9 pens and gives away 4. How many pens does Mia have left?", "9 - 4 = 5. Answer: 5"),
    ("Tom has 2 bags with 3 pens in each. How many pens does Tom have in total?", "2 * 3 = 6. Answer: 6"),
)
"""Worked problems before the one that is asked: a model of 135 M parameters does not follow the instruction alone."""

_TERMS = range(2, 13)
_FACTORS = range(2, 7)


class WordProblem(TypedDict):
    """One row of a prompt file."""

    prompt: list[dict[str, str]]
    """Chat messages: the instruction, the worked examples, the question."""
    label: str
    """The whole number that answers it."""


def word_problems(n: int, seed: int) -> list[WordProblem]:
    """Return n different word problems, drawn evenly from all of them; the same seed draws the same ones.

    Raises:
        DataError: There are fewer than n different problems.
    """
    kinds = [
        *product(SUMS, [(a, b, a + b) for a in _TERMS for b in _TERMS]),
        *product(DIFFERENCES, [(a, b, a - b) for a in _TERMS for b in range(2, a)]),
        *product(PRODUCTS, [(a, b, a * b) for a in _FACTORS for b in _FACTORS]),
    ]
    problems = [*product(kinds, NAMES, OBJECTS)]
    if n > len(problems):
        raise DataError(f"asked for {n} word problems, there are {len(problems)} different ones; ask for fewer")
    rows: list[WordProblem] = []
    for (text, (a, b, answer)), name, objects in random.Random(seed).sample(problems, n):
        question = text.format(name=name, objects=objects, a=a, b=b)
        rows.append({"prompt": _messages(question), "label": str(answer)})
    return rows


def _messages(question: str) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": INSTRUCTION}]
    for example, solution in EXAMPLES:
        messages += [{"role": "user", "content": example}, {"role": "assistant", "content": solution}]
    return [*messages, {"role": "user", "content": question}]
