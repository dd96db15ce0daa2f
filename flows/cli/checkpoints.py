"""`relax-pipeline checkpoints ls|show|verify`."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App
from rich.console import Console
from rich.table import Table

from relax_pipeline.checkpoint.manifest import read_manifest
from relax_pipeline.checkpoint.seal import verify
from relax_pipeline.checkpoint.store import CheckpointRef, CheckpointStore
from relax_pipeline.errors import CheckpointError

app = App(name="checkpoints", help="List, show and verify the checkpoints of a run.")


@app.command
def ls(run_folder: Path) -> None:
    """List the committed checkpoints of a run, oldest first.

    Parameters
    ----------
    run_folder
        Folder of the run, e.g. runs/NAME.
    """
    table = Table("step", "policy version", "MiB", "path")
    for ref in _committed(run_folder):
        manifest = read_manifest(ref.path)
        table.add_row(str(ref.step), str(manifest.policy_version), f"{ref.num_bytes / 2**20:.2f}", str(ref.path))
    Console(soft_wrap=True).print(table)


@app.command
def show(checkpoint: Path) -> None:
    """Print the manifest of one checkpoint.

    Parameters
    ----------
    checkpoint
        Its folder, e.g. runs/NAME/checkpoints/step-0000010.
    """
    Console(soft_wrap=True).print_json(read_manifest(checkpoint).model_dump_json())


@app.command(name="verify")
def verify_all(path: Path) -> None:
    """Compare every file with the size and sha256 it was written with; ends with an error if one differs.

    Parameters
    ----------
    path
        A run's folder, or one checkpoint's.
    """
    console = Console(soft_wrap=True)
    folders = [path] if path.name.startswith("step-") else [ref.path for ref in _committed(path)]
    damaged = 0
    for folder in folders:
        try:
            console.print(f"[green]intact[/]  {folder}  {len(verify(folder).files)} files")
        except CheckpointError as error:
            damaged += 1
            console.print(f"[red]damaged[/] {folder}  {error}")
    if damaged:
        raise CheckpointError(f"{damaged} of {len(folders)} checkpoints are damaged; a resume passes over them")


def _committed(run_folder: Path) -> list[CheckpointRef]:
    refs = CheckpointStore(run_folder / "checkpoints").committed()
    if not refs:
        raise CheckpointError(f"{run_folder} has no committed checkpoint; is it the folder of a run, e.g. runs/NAME?")
    return refs
