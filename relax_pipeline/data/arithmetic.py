"""Makes one-step arithmetic word problems: prompts for small real models, without a download."""

from __future__ import annotations

import random
from itertools import product

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
INSTRUCTION = 'Answer in one short sentence, then write "Answer: " and the number.'

_TERMS = range(2, 13)
_FACTORS = range(2, 7)


def word_problems(n: int, seed: int) -> list[dict[str, str]]:
    """Return different word problems in a shuffled order that follows from the seed.

    Args:
        n: How many, at most about 75 000.
        seed: The same seed gives the same problems; a larger n only adds to them.

    Returns:
        A row each: `prompt`, which asks to end with "Answer: N", and `label`, N as text.

    Raises:
        ValueError: There are fewer than n different problems.
    """
    kinds = [
        *product(SUMS, [(a, b, a + b) for a in _TERMS for b in _TERMS]),
        *product(DIFFERENCES, [(a, b, a - b) for a in _TERMS for b in range(2, a)]),
        *product(PRODUCTS, [(a, b, a * b) for a in _FACTORS for b in _FACTORS]),
    ]
    problems = [*product(kinds, NAMES, OBJECTS)]
    if n > len(problems):
        raise ValueError(f"asked for {n} word problems, there are {len(problems)} different ones")
    rows = []
    for (text, (a, b, answer)), name, objects in random.Random(seed).sample(problems, n):
        question = text.format(name=name, objects=objects, a=a, b=b)
        rows.append({"prompt": f"{question} {INSTRUCTION}", "label": str(answer)})
    return rows
