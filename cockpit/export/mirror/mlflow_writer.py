"""Writes steps as metrics of an MLflow run, with MLflow's client."""

import os
from collections.abc import Iterable

from agents.protocol import Hello
from cockpit.export.curves import Point

EXPERIMENT = "cockpit"
MOST_METRICS, MOST_PARAMETERS = 1000, 100  # MLflow's limits on one request
MOST_TEXT = 6000  # MLflow's limit on a parameter, in characters


class MlflowWriter:
    """`uri`: the tracking server, or a folder as a ``file:`` URI. The writer creates a run in the experiment
    ``cockpit``.

    Raises `mlflow.exceptions.MlflowException` if the server does not answer.
    """

    def __init__(self, uri: str, hello: Hello) -> None:
        # The mirror retries too, and for longer.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name(EXPERIMENT)
        experiment = known.experiment_id if known else self._client.create_experiment(EXPERIMENT)
        tags = {"cockpit.run": hello.run, "cockpit.simulated": str(hello.simulated).lower()}
        self._run = self._client.create_run(experiment, run_name=hello.run, tags=tags).info.run_id
        facts = [Param(name, str(value)[:MOST_TEXT]) for name, value in hello.facts.items()]
        self._client.log_batch(self._run, params=facts[:MOST_PARAMETERS])

    def write(self, points: Iterable[Point]) -> int:
        metrics = [
            self._metric(tag, float(value), int(summary.time_s * 1000), summary.step)
            for summary, values in points
            for tag, value in values.items()
        ]
        for first in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._run, metrics=metrics[first : first + MOST_METRICS])
        return len(metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run)
