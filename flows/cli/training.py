"""`relax-pipeline train`, `pause`, `plan` and `report`."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.prompt import Confirm
from rich.table import Table

from relax_pipeline.config import RunConfig, load_config
from relax_pipeline.errors import ConfigError

Overrides = Annotated[
    list[str] | None,
    Parameter(
        name="--set", negative=(), help="Override a setting, e.g. --set optimizer.learning_rate=4e-5. May be repeated."
    ),
]


def train(
    config: Path,
    *,
    overrides: Overrides = None,
    fresh: bool = False,
    yes: bool = False,
) -> None:
    """Train, or go on where the run of this name stopped.

    Without PREFECT_API_URL a local Prefect server is started for the command, and without a Ray address a local Ray;
    both end with it.

    Parameters
    ----------
    config
        YAML file of the run; deployments/recipes/ has examples.
    fresh
        Throw away what an earlier run of this name has left, and start from the base. Asks first.
    yes
        Do not ask.
    """
    run = load_config(config, overrides or ())
    _quieten()
    from relax_pipeline.plan import make_plan  # noqa: PLC0415 - what is heavy is loaded after what may be refused

    if fresh:
        _remove_run(run, yes=yes)
    make_plan(run).raise_if_refused()
    _train_and_publish(run)


def _train_and_publish(run: RunConfig) -> None:
    from flows.local_server import prefect_server  # noqa: PLC0415
    from flows.merge_publish import merge_and_publish  # noqa: PLC0415
    from flows.train import train_policy  # noqa: PLC0415

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    with prefect_server() as url:
        console.print(f"run [bold]{run.run_name}[/], watched at {url.removesuffix('/api')}")
        state = train_policy(run, return_state=True)
        if state.name == "Paused":
            console.print(state.message)
            return
        result: Any = state.result()
        console.print(f"report: {result['report']}")
        if run.publish.enabled:
            model = merge_and_publish(run.run_name, output_dir=run.output_dir)
            console.print(f"model:  {model['model']}\nat:     {model['published']['uri']}")


def plan(config: Path, *, overrides: Overrides = None) -> None:
    """Show what a run would do, how large it is, and what would be refused. Starts nothing, loads no weights.

    Parameters
    ----------
    config
        YAML file of the run.
    """
    run = load_config(config, overrides or ())
    from relax_pipeline.plan import make_plan  # noqa: PLC0415
    from relax_pipeline.plan_table import plan_rows  # noqa: PLC0415

    made = make_plan(run)
    console = Console(soft_wrap=True)
    table = Table(title=f"plan of {run.run_name}", show_header=False, title_justify="left")
    for name, value in plan_rows(made):
        table.add_row(name, escape(value))
    console.print(table)
    console.print_json(run.model_dump_json())
    made.raise_if_refused()


def pause(run_folder: Path) -> None:
    """Ask a run to save a checkpoint after the step it is at, free its GPUs, and wait.

    A flow run of a deployment is suspended until Resume in the UI, which asks what is to change; one started by hand
    ends, and `relax-pipeline train` goes on with it.

    Parameters
    ----------
    run_folder
        Folder of the run, e.g. runs/NAME.
    """
    from relax_pipeline.session.pause import request_pause  # noqa: PLC0415

    request_pause(run_folder)
    Console(stderr=True, soft_wrap=True).print(f"{run_folder.resolve().name} pauses after the step it is at")


def report(run_folder: Path) -> None:
    """Write report.html of a run again, from its metrics.

    Parameters
    ----------
    run_folder
        Folder of the run, e.g. runs/NAME.
    """
    from relax_pipeline.metrics.report import write_report  # noqa: PLC0415

    if not (run_folder / "config.json").is_file():
        raise ConfigError(f"{run_folder} is no run folder: it has no config.json")
    Console().print(str(write_report(run_folder)), highlight=False)


def _quieten() -> None:
    """Keep the terminal to what a person training wants to read; the UI and the logs hold the rest."""
    defaults = {
        "PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL": "WARNING",
        "PREFECT_CLI_COLORS": "true" if sys.stderr.isatty() else "false",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    if sys.stderr.isatty():  # the bar shows what the log lines say
        defaults["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "WARNING"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _remove_run(run: RunConfig, *, yes: bool) -> None:
    """Delete the run's folder, once that is confirmed."""
    from relax_pipeline.inputs import run_folder  # noqa: PLC0415 - loads transformers

    folder = run_folder(run)
    if not folder.exists():
        return
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"--fresh would delete {folder}; add --yes to confirm")
        if not Confirm.ask(f"delete {folder} and all its checkpoints?"):
            raise ConfigError("nothing was deleted; leave --fresh out to go on with the run")
    shutil.rmtree(folder)
