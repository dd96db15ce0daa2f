"""The command's entry point: its sub-commands, and how errors are shown."""

from __future__ import annotations

import os
import sys
import warnings

from cyclopts import App
from rich.console import Console

from flows.cli import checkpoints, diagnosis, models, submit, training
from relax_pipeline import __version__
from relax_pipeline.errors import RelaxError

app = App(
    name="relax-pipeline",
    version=__version__,
    help="""LoRA reinforcement-learning post-training as a workflow.

    A run is named in its configuration and lives in `runs/NAME`: `plan` shows what it will do, `train` does it or goes
    on where it stopped, `publish` turns its newest checkpoint into a standalone model in object storage.
    """,
)
app.command(training.train)
app.command(training.pause)
app.command(submit.submit)
app.command(training.plan)
app.command(training.report)
app.command(diagnosis.sync_check)
app.command(diagnosis.doctor)
app.command(checkpoints.app)
app.command(models.merge)
app.command(models.publish)
app.command(models.published)


def main() -> None:
    """Run the command line; an error that has an explanation is shown without a traceback."""
    warnings.formatwarning = _format_warning
    try:
        app(sys.argv[1:])
    except RelaxError as error:
        if os.environ.get("RELAX_DEBUG"):
            raise
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error[/]: {error}", highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning as a person reads it: what, not where in our code."""
    return f"warning: {message}\n"
