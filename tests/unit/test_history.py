from __future__ import annotations

from relax_pipeline.metrics.history import History
from relax_pipeline.metrics.log import series


def test_few_steps_are_all_kept() -> None:
    history = History(max_points=4)
    for step in (1, 2, 3):
        history.add(step, {"reward": step / 2})
    assert history.rows() == [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 1.0}, {"step": 3, "reward": 1.5}]


def test_many_steps_are_thinned_evenly_and_end_with_the_newest() -> None:
    history = History(max_points=4)
    for step in range(12):
        history.add(step, {"reward": float(step)})
    assert [row["step"] for row in history.rows()] == [0, 4, 8, 11]


def test_ten_thousand_steps_stay_within_the_bound() -> None:
    history = History(max_points=100)
    for step in range(10_000):
        history.add(step, {"reward": 1.0})
    assert 50 <= len(history.rows()) <= 101


def test_a_rare_metric_is_not_thinned_with_a_frequent_one() -> None:
    history = History(max_points=10)
    for step in range(100):
        history.add(step, {"reward": 0.0} | ({"eval/reward": step / 100} if step % 25 == 0 else {}))
    assert series(history.rows(), "eval/reward") == [(0, 0.0), (25, 0.25), (50, 0.5), (75, 0.75)]
