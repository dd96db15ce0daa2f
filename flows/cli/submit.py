"""`relax-pipeline submit`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from flows.cli.training import Overrides
from relax_pipeline.config import load_config
from relax_pipeline.errors import ConfigError


def submit(config: Path, *, overrides: Overrides = None, deployment: str = "relax-train/train") -> None:
    """Hand a run to the workers of a Prefect server, and return.

    PREFECT_API_URL names the server. The files that the configuration names must be there on the worker's machine.

    Parameters
    ----------
    config
        YAML file of the run; deployments/recipes/ has examples.
    deployment
        FLOW/NAME of the deployment to run; deployments/prefect.yaml makes relax-train/train.
    """
    run = load_config(config, overrides or ())
    from prefect.client.orchestration import get_client  # noqa: PLC0415 - takes a second
    from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError  # noqa: PLC0415
    from prefect.settings import PREFECT_API_URL, PREFECT_UI_URL  # noqa: PLC0415

    if not PREFECT_API_URL.value():
        raise ConfigError("PREFECT_API_URL is not set: name the server, e.g. http://127.0.0.1:4200/api")
    with get_client(sync_client=True) as client:
        try:
            found = client.read_deployment_by_name(deployment)
            parameters = {"config": run.model_dump(mode="json")}
            flow_run = client.create_flow_run_from_deployment(found.id, parameters=parameters)
        except ObjectNotFound as error:
            raise ConfigError(
                f"no deployment {deployment!r} on {PREFECT_API_URL.value()}; make it with "
                "`prefect deploy --all --prefect-file deployments/prefect.yaml`"
            ) from error
        except PrefectHTTPStatusError as error:
            raise ConfigError(
                f"the server refuses this configuration, perhaps because {deployment} was deployed by another version; "
                f"deploy again: {error.response.text}"
            ) from error
    Console(soft_wrap=True).print(f"{run.run_name}: {PREFECT_UI_URL.value()}/runs/flow-run/{flow_run.id}")
