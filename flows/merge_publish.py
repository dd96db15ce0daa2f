"""The publishing flow: the newest checkpoint of a run becomes a standalone model, verified, and stored elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow
from prefect.logging import get_run_logger

from flows.giving_up import give_up_on_user_errors
from relax_pipeline.finished import describe_model, finished_run
from relax_pipeline.metrics.report import write_report
from tasks import publishing


@flow(name="relax-merge-publish", flow_run_name="publish-{run_name}", persist_result=False)
def merge_and_publish(
    run_name: str,
    *,
    output_dir: str = "runs",
    step: int | None = None,
    destination: str | None = None,
    endpoint_url: str | None = None,
    ray_address: str | None = None,
    only_if_enabled: bool = False,
) -> dict[str, Any]:
    """Merge a run's adapter into its base and publish the result. Doing it again changes nothing.

    Args:
        run_name: The training run.
        output_dir: Where runs lie.
        step: Checkpoint to take; none: the newest.
        destination: file:///folder or s3://bucket/prefix; none: the run's publish.destination, or only merge.
        endpoint_url: Of an S3-compatible store; none: the run's, or AWS.
        ray_address: Merge on this Ray cluster, which must reach the run's files; none: in this process.
        only_if_enabled: Do nothing for a run without publish.enabled. For triggers, which see every training run.
    """
    with give_up_on_user_errors():
        run = finished_run(Path(output_dir), run_name, step=step)
        if only_if_enabled and not run.config.publish.enabled:
            get_run_logger().info("%s has publish.enabled off: nothing to do", run_name)
            return {"step": run.step}
        merged = run.folder / "merged" / f"step-{run.step:07d}"
        report = publishing.merge(
            Path(run.config.model.path), run.checkpoint, run.step, merged, ray_address=ray_address
        )
        result: dict[str, Any] = {"model": str(merged), "step": run.step, "merge": report["counts"]}
        uri = destination or run.config.publish.destination
        if uri is not None:
            published = publishing.publish(
                merged,
                uri,
                run_name=run_name,
                step=run.step,
                endpoint_url=endpoint_url or run.config.publish.endpoint_url,
                card=describe_model(run),
            )
            publishing.record(run.folder, run.step, published)
            result["published"] = published
        result["report"] = str(write_report(run.folder))
    return result
