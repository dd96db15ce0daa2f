"""report.html of a run: one page, self-contained, made from the files in the run's folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from relax_pipeline.metrics.curves import Rows, charts, held_out
from relax_pipeline.metrics.log import StepLog, series
from relax_pipeline.metrics.text import bytes_text, seconds_text

_SAMPLED_STEPS = 8
Pairs = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number at the top of the page."""

    label: str
    value: str
    detail: str


def write_report(run_folder: Path) -> Path:
    """Write report.html from metrics.jsonl, samples.jsonl and config.json, and what merging and publishing left.

    Args:
        run_folder: Of a run in any state; what is not there yet is left out.
    """
    config = json.loads((run_folder / "config.json").read_text())
    rows = StepLog(run_folder / "metrics.jsonl").rows()
    finished, state = _state(rows, config)
    page = _template().render(
        name=config["run_name"],
        finished=finished,
        state=state,
        subtitle=_subtitle(config),
        figures=_figures(rows, config),
        charts=list(charts(rows).values()),
        tables=_tables(run_folder, rows, config),
        samples=_spread(StepLog(run_folder / "samples.jsonl").rows(), _SAMPLED_STEPS),
        config=json.dumps(config, indent=2),
    )
    file = run_folder / "report.html"
    file.write_text(page)
    return file


def report_markdown(run_folder: Path) -> str:
    """Return the report's figures and tables, without curves and completions, as Markdown."""
    config = json.loads((run_folder / "config.json").read_text())
    rows = StepLog(run_folder / "metrics.jsonl").rows()
    _, state = _state(rows, config)
    figures = [(figure.label, f"{figure.value} ({figure.detail})") for figure in _figures(rows, config)]
    sections = [f"# {config['run_name']}: {state}", _subtitle(config)]
    for title, pairs in {"Figures": figures, **_tables(run_folder, rows, config)}.items():
        if pairs:
            table = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in pairs)]
            sections += [f"## {title}", "\n".join(table)]
    return "\n\n".join(sections) + "\n"


def _state(rows: Rows, config: dict[str, Any]) -> tuple[bool, str]:
    """Return whether a run is finished, and how far it is, in words."""
    step = rows[-1]["step"] if rows else 0
    finished = step >= config["steps"]
    return finished, "finished" if finished else f"at step {step:,} of {config['steps']:,}"


def _tables(run_folder: Path, rows: Rows, config: dict[str, Any]) -> dict[str, Pairs]:
    return {
        "Sync health": _sync_health(rows, config),
        "Attempts": _attempts(run_folder),
        "Model": _model_facts(run_folder),
    }


def _template() -> Any:
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    return environment.get_template("report.html.jinja")


def _subtitle(config: dict[str, Any]) -> str:
    lora = config["lora"]
    trained = f"LoRA rank {lora['rank']}, alpha {lora['alpha']:g}" if lora["rank"] else "all weights trained"
    engines = f"{config['engine']['replicas']} x {config['engine']['kind']}"
    base = Path(config["model"]["path"]).name
    return f"{base}, {trained}, {config['trainer']['kind']} trainer, {engines}, {config['sync']['mode']} sync"


def _figures(rows: Rows, config: dict[str, Any]) -> list[Figure]:
    label, metric = held_out(rows)
    figures = [_before_after(rows, metric, label), _before_after(rows, "reward/mean", "training reward")]
    steps = series(rows, "seconds/step")
    if steps:
        tokens = _total(rows, "rollout/tokens")
        seconds = _total(rows, "seconds/step")
        generating = _total(rows, "seconds/generate")
        rate = f"{tokens / generating:,.0f} a second" if generating else ""
        updates = f"{series(rows, 'policy_version')[-1][1]:,.0f} optimizer steps"
        figures += [
            Figure("steps", f"{steps[-1][0]:,} of {config['steps']:,}", updates),
            Figure("tokens sampled", f"{tokens:,.0f}", rate),
            Figure("training time", seconds_text(seconds), f"{seconds_text(seconds / len(steps))} a step"),
        ]
    return [figure for figure in figures if figure]


def _before_after(rows: Rows, metric: str, label: str) -> Figure | None:
    points = series(rows, metric)
    if not points:
        return None
    (first, before), (last, after) = points[0], points[-1]
    if first == last:
        return Figure(label, f"{after:.3f}", f"step {last:,}")
    return Figure(label, f"{before:.3f} → {after:.3f}", f"step {first:,} → step {last:,}")


def _sync_health(rows: Rows, config: dict[str, Any]) -> Pairs:
    syncs = series(rows, "sync/bytes")
    if not syncs:
        return []
    probes = [value for _, value in series(rows, "sync/probe_difference")]
    fewest = min(value for _, value in series(rows, "sync/engines"))
    seconds = [value for _, value in series(rows, "seconds/sync")]
    checked = "digests, module names and probe logprobs compared with every engine"
    pairs = [
        ("syncs", f"{len(syncs):,}, the last of {bytes_text(syncs[-1][1])} to each engine"),
        ("verified", checked if config["sync"]["verify"] else "NO: sync.verify is off"),
        ("engines", f"never fewer than {fewest:.0f} of {config['engine']['replicas']} in service after a sync"),
        ("time", f"{seconds_text(sum(seconds) / len(seconds))} on average, {seconds_text(max(seconds))} at most"),
    ]
    if probes:
        pairs.append(("probe difference", f"{max(probes):.2g} nats in the mean, of the worst engine at the worst sync"))
    if differences := [value for _, value in series(rows, "train/rollout_logprob_abs_diff_max")]:
        pairs.append(("largest logprob difference", f"{max(differences):.2g} nats on any sampled token"))
    if rounding := series(rows, "sync/rounding_share"):
        pairs.append(
            ("lost to rounding", f"{rounding[-1][1]:.1%} of the folded entries did not move, at the last sync")
        )
    return pairs


def _attempts(run_folder: Path) -> Pairs:
    """When the run was begun and taken up again, where that happened at all."""
    attempts = StepLog(run_folder / "attempts.jsonl").rows()
    if len(attempts) < 2:
        return []
    return [(attempt["started"], f"from step {attempt['step']:,}") for attempt in attempts]


def _model_facts(run_folder: Path) -> Pairs:
    """What became of the checkpoints, where something did."""
    pairs: Pairs = []
    merges = sorted(run_folder.glob("merged/step-*/MERGE.json"))
    if merges:
        merge = json.loads(merges[-1].read_text())
        counts = merge["counts"]
        unmoved = max(merge["not_moved"].values(), default=0.0)
        pairs += [
            ("merged", str(merges[-1].parent)),
            ("folded", f"{counts['adapter_modules']:,} adapters into {counts['tensors_changed']:,} tensors"),
            ("checked", f"{counts['rows_verified']:,} rows computed again; base {merge['base_check']}"),
            ("lost to rounding", f"at most {unmoved:.1%} of the entries of a kind of module"),
        ]
    if (run_folder / "PUBLISHED.json").is_file():
        published = json.loads((run_folder / "PUBLISHED.json").read_text())
        size = f"{published['num_files']:,} files, {bytes_text(published['num_bytes'])}"
        pairs += [
            ("published", f"{published['uri']} (step {published['step']:,}, {size})"),
            ("digest", published["digest"]),
        ]
    return pairs


def _spread(rows: Rows, count: int) -> Rows:
    """Return at most `count` rows, the first and the last among them, evenly spread."""
    if len(rows) <= count:
        return rows
    return [rows[round(index * (len(rows) - 1) / (count - 1))] for index in range(count)]


def _total(rows: Rows, name: str) -> float:
    return sum(value for _, value in series(rows, name))
