"""Which curves a run is judged by, drawn for the report and for the Prefect UI."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relax_pipeline.metrics.log import series
from relax_pipeline.metrics.svg import Point, line_chart
from relax_pipeline.metrics.text import bytes_text

Rows = list[dict[str, Any]]
_PHASES = ("generate", "score", "train", "sync", "evaluate", "save")
_SYNC_PHASES = ("export", "transfer", "activate", "verify")


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over steps, and how to read them."""

    title: str
    y_label: str
    lines: dict[str, list[Point]]
    note: str

    def svg(self) -> str:
        """Return the drawing."""
        return line_chart(self.lines, title=self.title, x_label="step", y_label=self.y_label, width=600)


def charts(rows: Rows) -> dict[str, Chart]:
    """Return the charts of a run that have something to show, the most telling first."""

    def chart(title: str, y_label: str, names: Mapping[str, str], note: str) -> Chart:
        return Chart(title, y_label, {label: series(rows, n) for label, n in names.items() if series(rows, n)}, note)

    made = {
        "reward": chart(
            "Reward and held-out score",
            "score",
            {"training reward": "reward/mean", **dict([held_out(rows)])},
            "Both rise while the policy learns; held-out prompts are never trained on.",
        ),
        "logprobs": chart(
            "Mean |rollout - policy| logprob",
            "nats",
            {"mean": "train/rollout_logprob_abs_diff"},
            "How far engine and trainer disagree on what was sampled. A jump means that a sync or a kernel went wrong.",
        ),
        "entropy": chart(
            "Entropy", "nats", {"entropy": "train/entropy"}, "Near 0 the policy no longer explores and stops learning."
        ),
        "kl": chart(
            "KL divergence",
            "nats",
            {"policy from rollout": "train/rollout_kl", "policy from base": "train/kl_ref"},
            "How far training has moved from the policy that sampled, and from the base where a KL is configured.",
        ),
        "shares": chart(
            "Shares",
            "share",
            {
                "clipped tokens": "train/clip_share",
                "capped tokens": "train/importance_capped_share",
                "cut completions": "rollout/cut_share",
                "equal groups": "rollout/zero_variance_share",
            },
            "Clipped and capped tokens train less; groups whose rewards are all equal do not train at all.",
        ),
        "length": chart("Completion length", "tokens", {"mean": "rollout/length_mean"}, "Mean of a step."),
        "gradient": chart("Gradient norm", "norm", {"norm": "train/grad_norm"}, "Before clipping."),
        "norms": chart(
            "Adapter norm",
            "norm",
            {_module_kind(name): name for name in _names(rows) if name.startswith("adapter_norm/")},
            "Size of the learned delta by kind of module. A kind that stays at 0 is not training.",
        ),
        "staleness": chart(
            "Staleness",
            "versions",
            {"mean": "staleness/mean", "max": "staleness/max"} if _any(rows, "staleness/max") else {},
            "How many policy versions behind the trainer the samples are.",
        ),
        "sync_seconds": chart(
            "Sync time",
            "seconds",
            {phase: f"sync/{phase}_seconds" for phase in _SYNC_PHASES},
            "From the trainer's weights to engines that have shown that they run them.",
        ),
        "sync_bytes": _bytes_chart(rows),
        "phases": chart(
            "Where the time goes",
            "seconds",
            {phase: f"seconds/{phase}" for phase in _PHASES},
            "Phases of a step. A save is counted to the step after it.",
        ),
    }
    return {key: chart for key, chart in made.items() if chart.lines}


def held_out(rows: Rows) -> tuple[str, str]:
    """Return label and metric of the held-out score: accuracy where the scorers tell it, else the reward."""
    if "eval/accuracy" in _names(rows):
        return "held-out accuracy", "eval/accuracy"
    return "held-out reward", "eval/reward"


def curves_markdown(rows: Rows) -> str:
    """Return the main curves as images inside Markdown, and the latest values as a table."""
    made = charts(rows)
    images = [
        f"![{made[key].title}](data:image/svg+xml;base64,{b64encode(made[key].svg().encode()).decode()})"
        for key in ("reward", "logprobs", "sync_seconds")
        if key in made
    ]
    table = ["| latest | |", "|---|---|", *(f"| {name} | {value} |" for name, value in latest(rows))]
    return "\n\n".join([*images, "\n".join(table)]) + "\n"


def latest(rows: Rows) -> list[tuple[str, str]]:
    """Return the newest value of what one looks at first, as text."""
    label, metric = held_out(rows)
    wanted = {
        "step": ("step", "{:,.0f}"),
        "policy version": ("policy_version", "{:,.0f}"),
        "training reward": ("reward/mean", "{:.3f}"),
        label: (metric, "{:.3f}"),
        "tokens/s": ("rollout/tokens_per_second", "{:,.0f}"),
        "seconds a step": ("seconds/step", "{:.2f}"),
        "mean probe difference of the sync, worst engine": ("sync/probe_difference", "{:.2g}"),
    }
    found = {name: (series(rows, metric), form) for name, (metric, form) in wanted.items()}
    return [(name, form.format(points[-1][1])) for name, (points, form) in found.items() if points]


def _bytes_chart(rows: Rows) -> Chart:
    """Bytes in the unit that suits the largest sync."""
    points = series(rows, "sync/bytes")
    unit = bytes_text(max((value for _, value in points), default=0.0)).rpartition(" ")[2]
    size = 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit)
    lines = {"to each engine": [(step, value / size) for step, value in points]} if points else {}
    return Chart("Sync size", unit, lines, "Sent to each engine; 0 where it already held the version.")


def _module_kind(name: str) -> str:
    return name.partition("/")[2].removesuffix("_proj")


def _names(rows: Rows) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _any(rows: Rows, name: str) -> bool:
    return any(value for _, value in series(rows, name))
