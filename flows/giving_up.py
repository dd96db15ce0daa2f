"""Some failures do not get better by trying again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRunPolicy
from prefect.runtime import flow_run

from relax_pipeline.errors import CheckpointError, ConfigError, DataError, ModelError, RewardError, RunLockedError

_USER_ERRORS = (ConfigError, DataError, ModelError, RewardError, CheckpointError, RunLockedError)


@contextmanager
def give_up_on_user_errors() -> Iterator[None]:
    """Let a failure that only a person can mend fail the flow run at once, without its retries."""
    try:
        yield
    except _USER_ERRORS:
        if flow_run.id is not None:
            with get_client(sync_client=True) as client:
                client.update_flow_run(flow_run.id, empirical_policy=FlowRunPolicy(retries=0, retry_delay=0))
        raise
