from __future__ import annotations

from pathlib import Path

import pytest

from relax_pipeline.metrics.log import StepLog, series


@pytest.fixture
def log(tmp_path: Path) -> StepLog:
    log = StepLog(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        log.append(step, {"reward": step / 2})
    return log


def test_no_file_is_no_rows(tmp_path: Path) -> None:
    assert StepLog(tmp_path / "metrics.jsonl").rows() == []


def test_rows_come_back_in_order(log: StepLog) -> None:
    assert log.rows() == [
        {"step": 1, "reward": 0.5},
        {"step": 2, "reward": 1.0},
        {"step": 3, "reward": 1.5},
    ]


def test_rewind_forgets_later_steps(log: StepLog) -> None:
    log.rewind(1)
    assert [row["step"] for row in log.rows()] == [1]


def test_rewind_of_a_new_run_makes_an_empty_file(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "metrics.jsonl")
    log.rewind(0)
    assert log.file.read_text() == ""


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_line_that_a_crash_cut_short_is_left_out(log: StepLog, cut: int) -> None:
    log.file.write_bytes(log.file.read_bytes()[:-cut])
    assert [row["step"] for row in log.rows()] == [1, 2]


def test_after_a_crash_and_a_rewind_new_rows_are_whole(log: StepLog) -> None:
    log.file.write_bytes(log.file.read_bytes()[:-3])
    log.rewind(2)
    log.append(3, {"reward": 9.0})
    assert log.rows()[-1] == {"step": 3, "reward": 9.0}


def test_line_separators_inside_texts_do_not_cut_lines(log: StepLog) -> None:
    text = "a\u2028b\x85c\nd"
    log.append(4, {"text": text})
    assert log.rows()[-1]["text"] == text


def test_series_leaves_out_steps_without_the_metric(log: StepLog) -> None:
    log.append(4, {"other": 1})
    assert series(log.rows(), "reward") == [(1, 0.5), (2, 1.0), (3, 1.5)]


def test_tail_of_no_file_is_no_rows(tmp_path: Path) -> None:
    assert StepLog(tmp_path / "metrics.jsonl").tail(2) == []


@pytest.mark.parametrize(("count", "steps"), [(1, [3]), (2, [2, 3]), (9, [1, 2, 3])])
def test_tail_is_the_newest_rows(log: StepLog, count: int, steps: list[int]) -> None:
    assert [row["step"] for row in log.tail(count)] == steps


def test_tail_reads_rows_larger_than_a_block_and_leaves_out_a_cut_one(log: StepLog) -> None:
    log.append(4, {"text": "x" * 200_000})
    with log.file.open("a") as file:
        file.write('{"step": 5, "te')
    assert [row["step"] for row in log.tail(2)] == [3, 4]
