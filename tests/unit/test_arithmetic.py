from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from relax_pipeline.config import PromptSource
from relax_pipeline.data.arithmetic import EXAMPLES, WordProblem, word_problems
from relax_pipeline.data.prompts import load_rows
from relax_pipeline.errors import DataError
from relax_pipeline.rewards.dapo import DapoScorer
from relax_pipeline.types import ScoreRequest


def question(row: WordProblem) -> str:
    return row["prompt"][-1]["content"]


def work_out(text: str) -> int:
    """Solve a problem by its wording alone."""
    first, second = (int(number) for number in re.findall(r"\d+", text))
    if re.search("in each|every day", text):
        return first * second
    return first - second if re.search("gives away|takes", text) else first + second


def test_labels_are_the_answers_to_the_questions() -> None:
    for row in word_problems(1000, seed=3):
        assert row["label"] == str(work_out(question(row)))


def test_answers_are_positive() -> None:
    assert min(int(row["label"]) for row in word_problems(1000, seed=3)) == 1


@pytest.mark.parametrize(("text", "solution"), EXAMPLES)
def test_worked_examples_are_right(text: str, solution: str) -> None:
    request = ScoreRequest(prompt=text, completion=solution, label=str(work_out(text)))
    assert DapoScorer()(request).value == 1.0


def test_no_problem_is_drawn_twice() -> None:
    rows = word_problems(5000, seed=0)
    assert len({question(row) for row in rows}) == 5000


def test_same_seed_draws_the_same_problems() -> None:
    assert word_problems(50, seed=7) == word_problems(50, seed=7)


def test_other_seed_draws_others() -> None:
    assert word_problems(50, seed=7) != word_problems(50, seed=8)


def test_more_problems_than_there_are_is_an_error() -> None:
    with pytest.raises(DataError, match="asked for 1000000 word problems, there are 48240 different ones"):
        word_problems(1_000_000, seed=0)


def test_recipe_writes_training_and_heldout_rows_that_do_not_overlap(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "deployments/recipes/make_prompts.py", str(tmp_path)], check=True)
    train = set((tmp_path / "train.jsonl").read_text().splitlines())
    heldout = set((tmp_path / "heldout.jsonl").read_text().splitlines())
    assert (len(train), len(heldout), len(train & heldout)) == (2000, 100, 0)


def test_rows_are_read_as_chats_with_labels(tmp_path: Path) -> None:
    problem = word_problems(1, seed=0)[0]
    (tmp_path / "one.jsonl").write_text(json.dumps(problem))
    row = load_rows(PromptSource(path=str(tmp_path / "one.jsonl")))[0]
    assert (row.prompt, row.label) == (tuple(problem["prompt"]), problem["label"])
