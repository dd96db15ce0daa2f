from __future__ import annotations

import json
import re
from base64 import b64decode
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from relax_pipeline.metrics.curves import charts, curves_markdown
from relax_pipeline.metrics.report import write_report
from relax_pipeline.metrics.text import bytes_text, seconds_text, sparkline

CONFIG = {
    "run_name": "sums",
    "steps": 3,
    "model": {"path": "/models/tiny"},
    "lora": {"rank": 6, "alpha": 12.0},
    "trainer": {"kind": "fsdp"},
    "engine": {"kind": "hf", "replicas": 2},
    "sync": {"mode": "adapter", "verify": True},
}
START: dict[str, Any] = {
    "step": 0,
    "sync/bytes": 3584.0,
    "sync/engines": 2.0,
    "sync/export_seconds": 0.25,
    "sync/probe_difference": 2e-6,
    "seconds/sync": 0.5,
    "eval/accuracy": 0.25,
    "eval/reward": 0.5,
}


def step_row(step: int, **values: float) -> dict[str, Any]:
    row = START | {
        "step": step,
        "reward/mean": 0.25 * step,
        "rollout/tokens": 1000.0,
        "rollout/tokens_per_second": 500.0,
        "seconds/generate": 2.0,
        "seconds/step": 41.0,
        "staleness/max": 0.0,
        "staleness/mean": 0.0,
        "train/rollout_logprob_abs_diff": 1e-7,
        "adapter_norm/q_proj": 0.5 * step,
        "policy_version": float(step),
        "eval/accuracy": 0.25 * step,
    }
    return row | values


ROWS = [START, step_row(1), step_row(2), step_row(3, **{"sync/engines": 1.0})]


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_lines(tmp_path / "metrics.jsonl", ROWS)
    return tmp_path


def write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sample_row(step: int, completion: str = "4") -> dict[str, Any]:
    sample = {"prompt": "2+2=", "completion": completion, "label": "4", "reward": 1.0, "policy_version": step - 1}
    return {"step": step, "trained_prompts": [0], "samples": [sample]}


def tiles(page: str) -> dict[str, tuple[str, str]]:
    found = re.findall(r'tile"><span>(.*?)</span><b>(.*?)</b><span>(.*?)</span>', page)
    return {label: (value, detail) for label, value, detail in found}


def facts(page: str) -> dict[str, str]:
    return dict(re.findall(r"<tr><th>(.*?)</th><td>(.*?)</td></tr>", page))


def test_key_figures_tell_before_and_after(run_folder: Path) -> None:
    assert tiles(write_report(run_folder).read_text()) == {
        "held-out accuracy": ("0.250 → 0.750", "step 0 → step 3"),
        "training reward": ("0.250 → 0.750", "step 1 → step 3"),
        "steps": ("3 of 3", "3 optimizer steps"),
        "tokens sampled": ("3,000", "500 a second"),
        "training time": ("2 min 03 s", "41 s a step"),
    }


def test_sync_health_names_the_worst(run_folder: Path) -> None:
    found = facts(write_report(run_folder).read_text())
    assert found["syncs"] == "4, the last of 3.5 KiB to each engine"
    assert found["engines"] == "never fewer than 1 of 2 in service after a sync"
    assert found["probe difference"] == "2e-06 nats in the mean, of the worst engine at the worst sync"


def test_sync_without_verification_says_so(run_folder: Path) -> None:
    (run_folder / "config.json").write_text(json.dumps(CONFIG | {"sync": {"mode": "adapter", "verify": False}}))
    assert facts(write_report(run_folder).read_text())["verified"] == "NO: sync.verify is off"


def test_page_loads_nothing_and_runs_nothing(run_folder: Path) -> None:
    page = write_report(run_folder).read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"<script|<link|<img|https?://|url\(|@import", page)


def test_completions_are_shown_as_text(run_folder: Path) -> None:
    write_lines(run_folder / "samples.jsonl", [sample_row(1, "</div><script>alert('x')</script>")])
    page = write_report(run_folder).read_text()
    assert "&lt;/div&gt;&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;" in page
    assert "<script" not in page


def test_completions_are_spread_over_the_run(run_folder: Path) -> None:
    write_lines(run_folder / "samples.jsonl", [sample_row(step) for step in range(1, 102)])
    steps = re.findall(r'class="new">\n<td class="number">(\d+)<', write_report(run_folder).read_text())
    assert [int(step) for step in steps] == [1, 15, 30, 44, 58, 72, 87, 101]


def test_run_that_stopped_early_is_not_called_finished(run_folder: Path) -> None:
    write_lines(run_folder / "metrics.jsonl", ROWS[:3])
    assert '<span class="state">at step 2 of 3</span>' in write_report(run_folder).read_text()


def test_run_without_a_step_has_a_report(run_folder: Path) -> None:
    (run_folder / "metrics.jsonl").unlink()
    page = write_report(run_folder).read_text()
    assert "No step is finished yet." in page
    assert "at step 0 of 3" in page


def test_merged_and_published_models_are_named(run_folder: Path) -> None:
    merged = run_folder / "merged" / "step-0000003"
    merged.mkdir(parents=True)
    counts = {"adapter_modules": 14, "tensors_changed": 12, "rows_verified": 48}
    merge = {"counts": counts, "base_check": "matched", "not_moved": {"q_proj": 0.125, "o_proj": 0.5}}
    (merged / "MERGE.json").write_text(json.dumps(merge))
    published = {"step": 3, "uri": "s3://models/sums/step-3/", "digest": "ab12", "num_files": 7, "num_bytes": 2048}
    (run_folder / "PUBLISHED.json").write_text(json.dumps(published))
    found = facts(write_report(run_folder).read_text())
    assert found["folded"] == "14 adapters into 12 tensors"
    assert found["lost to rounding"] == "at most 50.0% of the entries of a kind of module"
    assert found["published"] == "s3://models/sums/step-3/ (step 3, 7 files, 2.0 KiB)"


def test_charts_without_values_are_left_out() -> None:
    assert list(charts(ROWS)) == ["reward", "logprobs", "norms", "sync_seconds", "sync_bytes", "phases"]


def test_staleness_is_drawn_once_there_is_some() -> None:
    made = charts([*ROWS, step_row(4, **{"staleness/max": 1.0, "staleness/mean": 0.5})])
    assert made["staleness"].lines["max"] == [(1, 0.0), (2, 0.0), (3, 0.0), (4, 1.0)]


def test_held_out_reward_stands_in_for_accuracy() -> None:
    rows = [{"step": 0, "eval/reward": 0.5}]
    assert charts(rows)["reward"].lines == {"held-out reward": [(0, 0.5)]}


def test_sync_size_is_drawn_in_its_own_unit() -> None:
    chart = charts(ROWS)["sync_bytes"]
    assert (chart.y_label, chart.lines["to each engine"][0]) == ("KiB", (0, 3.5))


def test_markdown_holds_three_images_and_the_latest_values() -> None:
    text = curves_markdown(ROWS)
    images = re.findall(r"!\[(.*?)\]\(data:image/svg\+xml;base64,(.*?)\)", text)
    assert [title for title, _ in images] == [
        "Reward and held-out score",
        "Mean |rollout - policy| logprob",
        "Sync time",
    ]
    assert all(ElementTree.fromstring(b64decode(data)).tag.endswith("svg") for _, data in images)
    assert "| training reward | 0.750 |" in text


def test_sparkline_spans_lowest_to_highest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], width=8) == "▁▂▃▄▅▆▇█"


def test_sparkline_takes_means_where_values_are_more_than_its_width() -> None:
    assert sparkline([0, 2, 6, 10, 15, 15], width=3) == "▁▅█"


@pytest.mark.parametrize(("values", "line"), [([], ""), ([2.5, 2.5], "▁▁")])
def test_sparkline_of_nothing_or_of_no_change(values: list[float], line: str) -> None:
    assert sparkline(values, width=10) == line


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (3584, "3.5 KiB"), (5 << 40, "5.0 TiB"), (1 << 50, "1,024.0 TiB")],
)
def test_bytes_as_text(num_bytes: int, text: str) -> None:
    assert bytes_text(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.1172, "0.117 s"), (59.0, "59 s"), (123.4, "2 min 03 s"), (3840.0, "1 h 04 min")]
)
def test_seconds_as_text(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text
