"""Writes steps as metrics of an MLflow run, with MLflow's client."""

import os
from collections.abc import Iterable

from agents.protocol import Hello
from cockpit.export.curves import Point, attempts

EXPERIMENT = "cockpit"
MOST_METRICS, MOST_PARAMETERS = 1000, 100  # MLflow's limits on one request
MOST_TEXT = 6000  # MLflow's limit on a parameter, in characters


class MlflowWriter:
    """`uri`: the tracking server, or a folder as a ``file:`` URI. The writer creates a run in the experiment
    ``cockpit``. MLflow cannot take back values, so each further attempt (`cockpit.export.curves.attempts`) is a run of
    its own, with the same tag ``cockpit.run``.

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
        self._experiment = known.experiment_id if known else self._client.create_experiment(EXPERIMENT)
        self._hello = hello
        facts = [Param(name, str(value)[:MOST_TEXT]) for name, value in hello.facts.items()]
        self._facts = facts[:MOST_PARAMETERS]
        self._last: int | None = None
        self._run = self._create(hello.run)

    def _create(self, name: str) -> str:
        tags = {"cockpit.run": self._hello.run, "cockpit.simulated": str(self._hello.simulated).lower()}
        run: str = self._client.create_run(self._experiment, run_name=name, tags=tags).info.run_id
        self._client.log_batch(run, params=self._facts)
        return run

    def write(self, points: Iterable[Point]) -> int:
        count = 0
        for again, attempt in attempts(points, self._last):
            if again:
                self._client.set_terminated(self._run)
                self._run = self._create(f"{self._hello.run} from step {attempt[0][0].step}")
            metrics = [
                self._metric(tag, float(value), int(summary.time_s * 1000), summary.step)
                for summary, values in attempt
                for tag, value in values.items()
            ]
            for first in range(0, len(metrics), MOST_METRICS):
                self._client.log_batch(self._run, metrics=metrics[first : first + MOST_METRICS])
            count += len(metrics)
            self._last = attempt[-1][0].step
        return count

    def close(self) -> None:
        self._client.set_terminated(self._run)
