"""`relax-pipeline sync-check` and `doctor`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows.cli.training import Overrides
from relax_pipeline.config import load_config
from relax_pipeline.errors import RelaxError

if TYPE_CHECKING:
    from relax_pipeline.sync_check import CheckedSync


def sync_check(config: Path, *, overrides: Overrides = None) -> None:
    """Start the run's trainer and engines, and prove that the engines serve what the trainer holds.

    In each sync mode, the base and then a random policy far from it are synced and compared. Ends with status 1 if
    an engine serves anything else.

    Parameters
    ----------
    config
        YAML file of the run.
    """
    run = load_config(config, overrides or ())
    from relax_pipeline.metrics.text import bytes_text, seconds_text  # noqa: PLC0415 - heavy, after what may be refused
    from relax_pipeline.sync_check import check_sync, sync_modes  # noqa: PLC0415

    phases = ("export", "transfer", "activate", "verify")
    table = Table(
        "mode", "version", "sent", *phases, "trainer - engine", "moved", "", title="sync", title_justify="left"
    )
    failures: list[str] = []
    for mode in sync_modes(run):
        for checked in _guarded(mode, check_sync(run, mode), failures):
            report, difference = checked.report, checked.report.probe_difference
            table.add_row(
                mode,
                str(report.version),
                bytes_text(report.num_bytes),
                *(seconds_text(report.seconds.get(phase, 0.0)) for phase in phases),
                "not compared" if difference is None else f"{difference:.2g}",
                f"{checked.moved:.2g}",
                "[red]wrong" if checked.failure else "[green]equal",
            )
    console = Console(soft_wrap=True)
    console.print(table)
    for failure in failures:
        console.print(f"[red]{escape(failure)}")
    if failures:
        sys.exit(1)


def doctor() -> None:
    """Show what is installed, which backends can start and why others cannot, and the GPUs."""
    from relax_pipeline.doctor import diagnose  # noqa: PLC0415 - loads torch

    table = Table(show_header=False)
    colours = {"ok": "green", "note": "yellow", "missing": "red"}
    for finding in diagnose():
        table.add_row(f"[{colours[finding.state]}]{finding.state}", finding.name, escape(finding.detail))
    Console(soft_wrap=True).print(table)


def _guarded(mode: str, checks: Iterator[CheckedSync], failures: list[str]) -> Iterator[CheckedSync]:
    """Yield what was checked, and note what failed, so that the next mode is tried too."""
    try:
        for checked in checks:
            if checked.failure:
                failures.append(f"{mode}, version {checked.report.version}: {checked.failure}")
            yield checked
    except RelaxError as error:
        failures.append(f"{mode}: {error}")
