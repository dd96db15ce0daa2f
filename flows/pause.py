"""The flow that asks a training run to pause: a form in the UI, where Prefect has no button for it."""

from __future__ import annotations

from pathlib import Path

from prefect import flow
from prefect.logging import get_run_logger

from relax_pipeline.session.pause import request_pause


@flow(name="relax-pause", flow_run_name="pause-{run_name}", persist_result=False)
def pause_run(run_name: str, *, output_dir: str = "runs") -> None:
    """Ask a run to save after the step it is at and to let go of its GPUs; its own flow run is then Suspended.

    Args:
        run_name: The training run.
        output_dir: Where runs lie.
    """
    request_pause(Path(output_dir).expanduser() / run_name)
    get_run_logger().info("%s pauses after the step it is at; Resume on the page of its flow run goes on", run_name)
