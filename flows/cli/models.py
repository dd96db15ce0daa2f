"""`relax-pipeline merge`, `publish` and `published`: from adapter to published model, without Prefect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cyclopts import App
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

published = App(name="published", help="List and verify published models.")


def merge(
    base: Path,
    adapter: Path,
    output: Path,
    *,
    dry_run: bool = False,
    allow_other_base: bool = False,
    keep_quantization: bool = False,
    check_logits: bool = False,
) -> None:
    """Fold an adapter into its base and write a standalone Hugging Face checkpoint.

    Parameters
    ----------
    base
        Folder of the base model.
    adapter
        A PEFT LoRA folder, or one of this software's checkpoints.
    output
        Folder to create.
    dry_run
        Print which adapter tensors go into which weights, and write nothing.
    allow_other_base
        Merge although the adapter was trained on another base; recorded in MERGE.json.
    keep_quantization
        Write a quantised base quantised again; by default it becomes bfloat16.
    check_logits
        Also compare logits of the result with base and adapter through peft: loads both models.
    """
    from relax_pipeline.merge.merge import merge_adapter  # noqa: PLC0415 - loads torch
    from relax_pipeline.merge.plan import plan_merge  # noqa: PLC0415

    console = Console(soft_wrap=True)
    if dry_run:
        rows = plan_merge(base, adapter, keep_quantization=keep_quantization).table()
        table = Table(*rows[0])
        for row in rows[1:]:
            table.add_row(*row)
        console.print(table)
        return
    with _byte_bar("merging") as progress:
        report = merge_adapter(
            base,
            adapter,
            output,
            allow_other_base=allow_other_base,
            keep_quantization=keep_quantization,
            check_logits=check_logits,
            progress=progress,
        )
    console.print(f"{output}: {report.counts}", highlight=False)


def publish(
    folder: Path, destination: str, *, run_name: str | None = None, step: int = 0, endpoint_url: str | None = None
) -> None:
    """Publish a merged model: all or nothing for its readers, and again for nothing.

    Parameters
    ----------
    folder
        The model.
    destination
        file:///folder or s3://bucket/prefix. Credentials come from the environment.
    run_name
        Names the model at the destination; by default the folder's name.
    step
        Training step it is from.
    endpoint_url
        Of an S3-compatible store.
    """
    from relax_pipeline.publish.upload import publish_model  # noqa: PLC0415

    with _byte_bar("publishing") as progress:
        report = publish_model(
            folder,
            destination,
            run_name=run_name or folder.resolve().name,
            step=step,
            endpoint_url=endpoint_url,
            progress=progress,
        )
    Console(soft_wrap=True).print(f"{report.outcome}: {report.uri}", highlight=False)


@published.command
def ls(destination: str, *, run_name: str | None = None, endpoint_url: str | None = None) -> None:
    """List the complete models at a destination.

    Parameters
    ----------
    destination
        file:///folder or s3://bucket/prefix.
    run_name
        Only this run's.
    endpoint_url
        Of an S3-compatible store.
    """
    from relax_pipeline.publish.published import list_published  # noqa: PLC0415

    table = Table("run", "step", "MiB", "latest", "uri")
    for model in list_published(destination, run_name=run_name, endpoint_url=endpoint_url):
        size = f"{model.num_bytes / 2**20:.1f}"
        table.add_row(model.run_name, str(model.step), size, "yes" if model.is_latest else "", model.uri)
    Console(soft_wrap=True).print(table)


@published.command
def verify(uri: str, *, endpoint_url: str | None = None) -> None:
    """Read a published model back and compare every file with its manifest.

    Parameters
    ----------
    uri
        Of the model, as `published ls` prints it.
    endpoint_url
        Of an S3-compatible store.
    """
    from relax_pipeline.publish.published import verify_published  # noqa: PLC0415

    model = verify_published(uri, endpoint_url=endpoint_url)
    Console(soft_wrap=True).print(f"intact: {model.uri}", highlight=False)


@contextmanager
def _byte_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a callback (bytes done, bytes in all) that draws a progress bar."""
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
