"""Mirrors a live run to other programs, and reads the result back with each program's own library."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cockpit.cli.main import run
from cockpit.data.sources.connection import CockpitError
from cockpit.export.mirror import command
from tests.unit.agents.conftest import Opened, opened, own_hub
from tests.unit.agents.fleet import Fleet, HubProcess

__all__ = ["opened", "own_hub"]
Values = dict[int, float]  # loss by step


def mirrored(hub: HubProcess, opened: Opened, to: str, out: str) -> Values:
    """Copy the metrics of a run of two ranks to another tool with `cockpit mirror` until the run ends; returns the loss
    that the hub sent for each step."""
    fleet = opened(Fleet(hub.endpoints.ranks, 2))
    target = command.TARGETS[to]
    writing, status = threading.Event(), list[int]()

    def opens(*given: Any) -> Any:
        made = target.open(*given)
        writing.set()
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(command.TARGETS, to, command.Target(opens, target.library, target.errors))
        url = f"ipc://{hub.endpoints.directory}"
        thread = threading.Thread(target=lambda: status.append(command.mirror(url, to, out)), daemon=True)
        thread.start()
        while not writing.wait(0.02):
            fleet.turn()
            assert thread.is_alive()
        for _ in range(20):
            fleet.turn()
        fleet.close()
        thread.join(30)
    assert status == [0]
    return dict.fromkeys(range(1, fleet.step + 1), 2.0)


def test_tensorboard(own_hub: HubProcess, opened: Opened, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sent = mirrored(own_hub, opened, "tensorboard", str(tmp_path))
    events = accumulator.EventAccumulator(str(tmp_path), size_guidance={"scalars": 0}).Reload()
    loss = events.Scalars("train/loss")
    assert {event.step: event.value for event in loss} == sent and len(loss) == len(sent)


def test_mlflow(own_hub: HubProcess, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow's server is not installed
    uri = tmp_path.as_uri()
    sent = mirrored(own_hub, opened, "mlflow", uri)
    client = mlflow.MlflowClient(tracking_uri=uri)
    (experiment,) = client.search_experiments(filter_string="name = 'cockpit'")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED" and found.data.tags["cockpit.simulated"] == "false"
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert {one.step: one.value for one in history} == sent and len(history) == len(sent)


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes], Callable[[int], None]]]:
    """An HTTP server in place of an OpenTelemetry collector: its URL, the bodies that it received, and a function that
    sets the status of its answers."""
    bodies: list[bytes] = []
    status = [200]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/metrics"
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(status[0])
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", bodies, lambda code: status.__setitem__(0, code)
    server.shutdown()
    server.server_close()


def points(bodies: list[bytes], name: str) -> list[Any]:
    service = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    return [
        point
        for body in bodies
        for resource in service.ExportMetricsServiceRequest.FromString(body).resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == name
        for point in metric.gauge.data_points
    ]


def test_opentelemetry(own_hub: HubProcess, opened: Opened, collector: Any) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    url, bodies, _ = collector
    sent = mirrored(own_hub, opened, "otlp", url)
    steps, losses = points(bodies, "cockpit.step"), points(bodies, "cockpit.train.loss")
    assert [point.as_int for point in steps] == list(sent)
    assert [point.as_double for point in losses] == list(sent.values())
    assert not points(bodies, "cockpit.train.mfu"), "a missing value has no data point"


def test_a_collector_that_refuses_ends_the_mirror_with_one_sentence(
    own_hub: HubProcess, opened: Opened, collector: Any
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    url, _, answer = collector
    answer(400)
    fleet = opened(Fleet(own_hub.endpoints.ranks, 2))
    fleet.turn()
    with pytest.raises(CockpitError, match="otlp did not accept the steps: "):
        command.mirror(f"ipc://{own_hub.endpoints.directory}", "otlp", url)


def test_bad_options_get_one_sentence(
    own_hub: HubProcess, opened: Opened, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    fleet = opened(Fleet(own_hub.endpoints.ranks, 2))
    fleet.turn()
    url = f"ipc://{own_hub.endpoints.directory}"
    for words, says in (
        (["mirror", url, "--to", "mlflow"], "name the MLflow server with --out URI or MLFLOW_TRACKING_URI"),
        (
            ["mirror", url, "--to", "tensorboard"],
            f"the folder of {url} is not known here; name one with --out FOLDER",
        ),
        (["mirror", url, "--to", "grafana"], "invalid choice: 'grafana'"),
    ):
        assert run(words) == 2
        said = capsys.readouterr().err
        assert says in said and said.count("\n") == 1
