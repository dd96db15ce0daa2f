"""The sweep: whatever is finished and not yet published gets published, in case a trigger was missed."""

from __future__ import annotations

from pathlib import Path

from prefect import flow
from prefect.logging import get_run_logger

from flows.merge_publish import merge_and_publish
from relax_pipeline.errors import PublishError, RelaxError
from relax_pipeline.finished import awaits_publishing, run_names


@flow(name="relax-publish-sweep", persist_result=False)
def publish_finished(*, output_dir: str = "runs", ray_address: str | None = None) -> list[str]:
    """Publish every finished run that asks for it and is not published; return their names.

    Args:
        output_dir: Where runs lie.
        ray_address: Merge on this Ray cluster, which must reach the runs' files; none: in this process.

    Raises:
        PublishError: Some could not be published. All others were.
    """
    published, failed = [], []
    for name in run_names(Path(output_dir)):
        try:
            if awaits_publishing(Path(output_dir), name):
                merge_and_publish(name, output_dir=output_dir, ray_address=ray_address)
                published.append(name)
        except RelaxError as error:
            get_run_logger().error("%s: %s", name, error)
            failed.append(name)
    if failed:
        raise PublishError(f"not published, see the log: {', '.join(failed)}")
    return published
