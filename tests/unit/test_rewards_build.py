from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from relax_pipeline.config import RewardsConfig, ScorerConfig
from relax_pipeline.errors import RewardError
from relax_pipeline.rewards.build import KINDS, build_scorer
from relax_pipeline.types import Score, ScoreRequest

REQUEST = ScoreRequest(prompt="2+3=", completion="Answer: 5", label="5", metadata={"bonus": 0.25})


def build(*scorers: dict[str, Any]) -> Any:
    return build_scorer(RewardsConfig(scorers=tuple(ScorerConfig(**scorer) for scorer in scorers)))


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(
        "from relax_pipeline.types import Score\n"
        "limit = 3\n"
        "def bonus(request, scale=1.0): return scale * request.metadata['bonus']\n"
        "def right(request): return request.label in request.completion\n"
        "def detailed(request): return Score(0.5, {'style': 0.75})\n"
        "def broken(request): return 1 / 0\n"
        "def infinite(request): return float('inf')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def test_default_is_math() -> None:
    assert build_scorer(RewardsConfig())(REQUEST) == Score(1.0, {"accuracy": 1.0})


def test_sum_is_weighted_and_shared_metrics_are_prefixed() -> None:
    scorer = build({"kind": "math", "weight": 2.0}, {"kind": "exact", "weight": 0.5}, {"kind": "dapo", "weight": 0.25})
    assert scorer(REQUEST) == Score(2.25, {"math/accuracy": 1.0, "exact/accuracy": 0.0, "dapo/accuracy": 1.0})


def test_a_metric_of_one_scorer_keeps_its_name() -> None:
    scorer = build({"kind": "math"}, {"kind": "regex", "weight": -0.5, "options": {"pattern": "Answer"}})
    assert scorer(REQUEST) == Score(0.5, {"accuracy": 1.0})


def test_scorers_of_one_kind_are_numbered() -> None:
    scorer = build(*({"kind": "regex", "options": {"pattern": pattern}} for pattern in ("(5)", "(6)")))
    assert scorer(REQUEST).metrics == {"regex_1/accuracy": 1.0, "regex_2/accuracy": 0.0}


@pytest.mark.parametrize(
    ("function", "options", "expected"),
    [
        ("bonus", {}, Score(0.25)),
        ("bonus", {"scale": 4}, Score(1.0)),
        ("right", {}, Score(1.0, {"accuracy": 1.0})),
        ("detailed", {}, Score(0.5, {"style": 0.75})),
    ],
)
@pytest.mark.usefixtures("user_module")
def test_python_function(function: str, options: dict[str, Any], expected: Score) -> None:
    assert build({"kind": f"python:my_rewards.{function}", "options": options})(REQUEST) == expected


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        ({"kind": "mat"}, "unknown scorer 'mat'; did you mean math\\? known: math, dapo, .*python:module.function"),
        ({"kind": "llm_judge_9000"}, "unknown scorer 'llm_judge_9000'; known: math"),
        ({"kind": "math", "options": {"strict": True}}, "scorer math: strict: Unexpected .*; its options: none"),
        ({"kind": "exact", "options": {"case": 1}}, "scorer exact: case: Unexpected .*; its options: ignore_case"),
        ({"kind": "regex"}, "scorer regex: pattern: Field required; its options: pattern"),
        ({"kind": "regex", "options": {"pattern": "("}}, "scorer regex: pattern: .*valid regular expression"),
        ({"kind": "remote", "options": {"url": "host:1"}}, "scorer remote: url: .*https"),
        ({"kind": "remote", "options": {"url": "http://h", "attempts": 0}}, "scorer remote: attempts: .*greater"),
        ({"kind": "python:no_such_module.f"}, "python:no_such_module.f: No module named 'no_such_module'; it must be"),
        ({"kind": "python:my_rewards.f"}, "python:my_rewards.f: module 'my_rewards' has no attribute 'f'"),
        ({"kind": "python:my_rewards.limit"}, "python:my_rewards.limit is a int, not a function"),
        ({"kind": "python:my_rewards.bonus", "options": {"scal": 2}}, "unexpected keyword argument 'scal'.*scale=1.0"),
    ],
)
@pytest.mark.usefixtures("user_module")
def test_wrong_configuration_says_what_to_change(scorer: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        build(scorer)


@pytest.mark.usefixtures("user_module")
def test_a_scorer_that_raises_is_named_with_the_label_and_the_cause() -> None:
    message = (
        r"PythonScorer\(path='my_rewards.broken', options={}\) on label '5' raised ZeroDivisionError: division by zero"
    )
    with pytest.raises(RewardError, match=message) as caught:
        build({"kind": "python:my_rewards.broken"})(REQUEST)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.usefixtures("user_module")
def test_a_score_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(RewardError, match=r"my_rewards.infinite.*returned inf; a score must be finite"):
        build({"kind": "python:my_rewards.infinite"})(REQUEST)


@pytest.mark.usefixtures("user_module")
def test_scorers_survive_pickling() -> None:
    options = {"regex": {"pattern": "(5)"}, "remote": {"url": "http://localhost:1"}}
    scorer = build(
        *({"kind": kind, "options": options.get(kind, {})} for kind in KINDS), {"kind": "python:my_rewards.bonus"}
    )
    assert pickle.loads(pickle.dumps(scorer)) == scorer
