"""Mirrors a live run to other programs, and reads the result back with each program's own library."""

import errno
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from agents.protocol import VERSION, Hello, Summary
from cockpit.cli.main import run
from cockpit.data.sources.connection import CockpitError
from cockpit.export.curves import Point
from cockpit.export.mirror import command
from cockpit.export.mirror.delivery import Delivery, Refusal
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
def collector() -> Iterator[tuple[str, list[bytes], Callable[..., None]]]:
    """An HTTP server in place of an OpenTelemetry collector: its URL, the bodies that it received, and a function that
    sets the status, the content type and the content of its next answers."""
    bodies: list[bytes] = []
    answer: list[Any] = [200, "", b""]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/metrics"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status, kind, content = answer
            self.send_response(status)
            if status == 200:
                bodies.append(body)
            if kind:
                self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield (
        f"http://127.0.0.1:{server.server_port}",
        bodies,
        lambda *new: answer.__setitem__(slice(len(new)), new),
    )
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


def rejecting(count: int) -> bytes:
    service = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    partial = service.ExportMetricsPartialSuccess(
        rejected_data_points=count, error_message="the quota is used up"
    )
    content: bytes = service.ExportMetricsServiceResponse(partial_success=partial).SerializeToString()
    return content


@pytest.mark.parametrize(
    ("kind", "content", "says"),
    [
        ("text/html; charset=utf-8", lambda: b"<html>Sign in</html>", "answers with text/html, so it is not"),
        ("application/x-protobuf", lambda: b"<html>", "does not answer like an OpenTelemetry collector"),
        ("application/json", lambda: b"{", "does not answer like an OpenTelemetry collector"),
        (
            "application/x-protobuf",
            lambda: rejecting(10**6),
            "rejected all data points: the quota is used up",
        ),
    ],
)
def test_an_answer_with_status_200_may_be_no_success(
    collector: Any, kind: str, content: Callable[[], bytes], says: str
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from cockpit.export.mirror.otlp_writer import OtlpWriter

    url, _, answer = collector
    answer(200, kind, content())
    delivery = Delivery(OtlpWriter(url, HELLO), (), lambda *_: None)
    delivery.put([(SUMMARY, {"train/loss": 2.0})])
    delivery.close()
    assert isinstance(delivery.failure, Refusal) and says in str(delivery.failure)
    assert (delivery.written, delivery.unsent) == (0, 1)


def test_values_that_are_rejected_later_are_counted(collector: Any) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from cockpit.export.mirror.otlp_writer import OtlpWriter

    url, _, answer = collector
    writer = OtlpWriter(url, HELLO)
    assert writer.write([(SUMMARY, {"train/loss": 2.0})]) == 2
    for answered in (rejecting(1), rejecting(2), b""):
        answer(200, "application/x-protobuf", answered)
        writer.write([(SUMMARY, {"train/loss": 2.0})])
    answer(200, "application/json", b'{"partialSuccess": {"rejectedDataPoints": "2"}}')
    assert writer.write([(SUMMARY, {"train/loss": 2.0})]) == 0
    assert writer.rejected == 5


def test_an_outage_loses_no_step_and_is_reported_once(
    collector: Any, hasty: None, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from cockpit.export.mirror.otlp_writer import OtlpWriter

    class Recovering(OtlpWriter):
        attempts = 0

        def write(self, points: Iterable[Point]) -> int:
            self.attempts += 1
            # For other statuses, such as 503, the SDK itself retries for 10 s.
            answer(500 if self.attempts in (2, 3, 4) else 200)
            return super().write(points)

    url, bodies, answer = collector
    delivery = Delivery(Recovering(url, HELLO), (), partial(command._report, "otlp"))
    delivery.put([(structs.replace(SUMMARY, step=step), {}) for step in range(40)])
    delivery.close()
    assert delivery.written == 40
    assert [point.as_int for point in points(bodies, "cockpit.step")] == list(range(40))
    said = capsys.readouterr()
    assert said.err.count("\n") == said.err.count("the mirror retries until the run ends") == 1
    assert "otlp did not accept the steps: " in said.err
    assert said.out.startswith("otlp accepts the steps again, after ")


# ------------------------------------------------------------------------------------------ delivery

HELLO = Hello(VERSION, "run", 0, 1, {}, "host", 1, "", "-", 0, 0, True)
SUMMARY = Summary(1, 0, 1.0, 2.0, None, 10.0, None, None, None, None, False, None, {}, None, None, {})


class Writer:
    """A program that fails with the errors in `fails`, one for each write, and then accepts all steps."""

    def __init__(self, fails: Sequence[Exception]) -> None:
        self.fails, self.steps, self.closed = list(fails), list[int](), False

    def write(self, points: Iterable[Point]) -> int:
        if self.fails:
            raise self.fails.pop(0)
        self.steps += [summary.step for summary, _ in points]
        return 0

    def close(self) -> None:
        self.closed = True


def delivered(
    fails: Sequence[Exception], counts: Sequence[int] = (40,)
) -> tuple[Delivery, Writer, list[bool]]:
    writer, reports = Writer(fails), list[bool]()
    delivery = Delivery(writer, (KeyError,), lambda refusal, _: reports.append(refusal is not None))
    first = 0
    for count in counts:
        delivery.put([(structs.replace(SUMMARY, step=first + step), {}) for step in range(count)])
        first += count
    delivery.close()
    return delivery, writer, reports


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cockpit.export.mirror.delivery.RETRY_S", (0.001, 0.002))


def test_each_step_is_written_once_and_in_order(hasty: None) -> None:
    delivery, writer, reports = delivered([KeyError(), Refusal("absent"), KeyError()], (3, 1, 50))
    assert writer.steps == list(range(54)) and writer.closed
    assert (delivery.written, delivery.unsent, delivery.failure, reports) == (54, 0, None, [True, False])


def test_a_program_that_stays_absent_leaves_its_steps_unsent(
    hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cockpit.export.mirror.delivery.END_S", 0.1)
    delivery, writer, reports = delivered([Refusal("absent")] * 10_000)
    assert (writer.steps, delivery.written, delivery.unsent, delivery.outage) == ([], 0, 40, True)
    assert reports == [True]


def test_only_a_first_step_can_be_refused_for_good(hasty: None) -> None:
    refused = delivered([Refusal("no", lasting=True)])[0]
    assert isinstance(refused.failure, Refusal) and not refused.outage and refused.unsent == 40
    program = Delivery(writer := Writer([]), (), lambda *_: None)
    program.put([(SUMMARY, {})])
    while not program.written:
        threading.Event().wait(0.001)
    writer.fails = [Refusal("no", lasting=True)]
    program.put([(SUMMARY, {})])
    program.close()
    assert (program.failure, program.written) == (None, 2)


def test_a_full_queue_drops_its_oldest_steps_and_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cockpit.export.mirror.delivery.MOST_STEPS", 30)
    delivery, writer, _ = delivered([])
    assert (delivery.dropped, writer.steps) == (10, list(range(10, 40)))


def test_a_step_that_the_hub_sends_again_is_mirrored_once() -> None:
    def steps(*given: tuple[int, float]) -> list[Summary]:
        return [structs.replace(SUMMARY, step=step, time_s=time_s) for step, time_s in given]

    connection: Any = SimpleNamespace(store=SimpleNamespace(state=SimpleNamespace(summaries=[])), last=[])
    new = command._NewSteps(connection)

    def taken(rebuilt: bool, *given: tuple[int, float]) -> list[int]:
        connection.last = connection.store.state.summaries = steps(*given)
        return [summary.step for summary in new.take(rebuilt)]

    assert taken(True, (0, 10.0), (1, 11.0)) == [0, 1]
    assert taken(False, (1, 11.0), (2, 12.0), (3, 13.0)) == [2, 3]
    assert taken(True, (0, 10.0), (1, 11.0), (2, 12.0)) == []  # an older snapshot
    assert taken(False, (3, 13.0), (2, 20.0), (3, 21.0)) == [2, 3]  # the run was resumed at step 2
    assert new.missed == 0 and new.first == 0


def test_a_full_disk_ends_the_delivery_and_names_the_folder(tmp_path: Path) -> None:
    full = delivered([OSError(errno.ENOSPC, "No space left on device")])[0].failure
    assert isinstance(full, OSError)
    where = f"{tmp_path}; view them with tensorboard"
    why = str(command._problem("tensorboard", where, full))
    assert why == f"{tmp_path} cannot be written: No space left on device"


def test_the_remedy_at_the_end_of_a_reason_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    exceptions = pytest.importorskip("mlflow.exceptions")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    from cockpit.export.mirror.mlflow_writer import MlflowWriter

    with pytest.raises(exceptions.MlflowException) as refused:
        MlflowWriter(tmp_path.as_uri(), HELLO)
    assert str(refused.value).index("MLFLOW_ALLOW_FILE_STORE") > 200
    assert "MLFLOW_ALLOW_FILE_STORE" in str(command._problem("mlflow", "", refused.value))
    long = str(command._problem("mlflow", "", ValueError("x" * 100_000 + " set THIS")))
    assert long.endswith("set THIS") and len(long) < 2100


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
