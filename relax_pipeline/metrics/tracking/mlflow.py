"""MLflow: on the server that MLFLOW_TRACKING_URI names, else in mlflow.db beside the run's folder."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from relax_pipeline.errors import TrackingError
from relax_pipeline.metrics.tracking.base import TrackedRun

_RUN_ID_TAG = "relax.run_id"


class MlflowTracker:
    """One run of the experiment MLFLOW_EXPERIMENT_NAME for all attempts, found again by a tag."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient  # noqa: PLC0415 - an extra
        from mlflow.entities import Metric  # noqa: PLC0415
        from mlflow.exceptions import MlflowException  # noqa: PLC0415

        self._make_metric, self._error = Metric, MlflowException
        uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{run.folder.parent / 'mlflow.db'}")
        self._client: Any = MlflowClient(tracking_uri=uri)
        try:
            self._run_id = self._find_run(run)
        except MlflowException as error:
            raise TrackingError(f"mlflow at {uri}: {error}; look at MLFLOW_TRACKING_URI and its server") from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        now = int(1000 * time.time())
        metrics = [self._make_metric(name, value, now, step) for name, value in values.items()]
        try:
            self._client.log_batch(self._run_id, metrics=metrics)
        except self._error as error:
            raise TrackingError(f"mlflow did not take step {step}: {error}") from error

    def close(self) -> None:
        """See `Tracker.close`."""
        try:
            self._client.set_terminated(self._run_id)
        except self._error as error:
            raise TrackingError(f"mlflow did not take the end of the run: {error}") from error

    def _find_run(self, run: TrackedRun) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "relax-pipeline")
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        found = self._client.search_runs([experiment_id], f"tags.`{_RUN_ID_TAG}` = '{run.run_id}'", max_results=1)
        if not found:
            found = [self._client.create_run(experiment_id, run_name=run.name, tags={_RUN_ID_TAG: run.run_id})]
        run_id: str = found[0].info.run_id
        return run_id
