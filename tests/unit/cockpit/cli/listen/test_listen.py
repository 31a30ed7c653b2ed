"""`cockpit listen` turns OpenTelemetry exports into runs. The sender is the official OpenTelemetry SDK."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")


from cockpit.export.incoming import runs as exported
from cockpit.export.incoming.exports import spans_of
from tests.unit.cockpit.cli.listen.exports import DEADLINE_S, LOSS, STEP_MS, Noted, request


def cockpit(runs: Path, *words: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "cockpit", *words, "--json"],
        env=os.environ | {"COCKPIT_RUNS": str(runs)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    records = [json.loads(line) for line in done.stdout.splitlines()]
    return records if words[0] == "log" else records[0] if records else done.stderr


def until(true: Callable[[], Any]) -> Any:
    """Call the function `true` repeatedly until it returns a truthy value, and return that value."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := true()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


class Training:
    """A program that sends OpenTelemetry metrics and traces as Megatron-LM does. `export` sends its metrics."""

    def __init__(self, url: str, run_id: str = "r1") -> None:
        from opentelemetry.exporter.otlp.proto.http import Compression
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor

        attributes = {"service.name": "megatron-lm", "nemo.run.id": run_id, "host.name": "node7"}
        resource = Resource.create(attributes | {"dl.tensor_parallel.size": 8, "megatron.train_iters": 20})
        metrics = OTLPMetricExporter(f"{url}/v1/metrics", compression=Compression.Gzip)
        reader = PeriodicExportingMetricReader(metrics, export_interval_millis=3_600_000)
        self._meters = MeterProvider(resource=resource, metric_readers=[reader], shutdown_on_exit=False)
        self._tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._tracers.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(f"{url}/v1/traces")))
        self.tracer, meter = self._tracers.get_tracer("megatron"), self._meters.get_meter("megatron")
        name = "megatron.training.{}".format
        self._duration = meter.create_histogram(name("step_duration_ms"), unit="ms")
        gauges = ("loss", "learning_rate", "tokens_per_sec", "memory_allocated_gb")
        self._gauges = [meter.create_gauge(name(one)) for one in gauges]
        self._norm = meter.create_gauge("my.norm")
        self._skipped = meter.create_counter(name("skipped_iters"))

    def step(self, iteration: int, ms: float, loss: float) -> None:
        """Record step `iteration`, which takes `ms`."""
        with self.tracer.start_as_current_span(
            "megatron.train.iteration", attributes={"megatron.iteration": iteration}
        ):
            self._duration.record(ms)
        for gauge, value in zip(self._gauges, (loss, 1e-4, 80_000.0, 40.5), strict=True):
            gauge.set(value)
        self._norm.set(1.5)

    def skip(self) -> None:
        self._skipped.add(1)

    def export(self) -> None:
        assert self._meters.force_flush()

    def close(self) -> None:
        self._meters.shutdown()
        self._tracers.shutdown()


def test_a_training_that_exports_is_shown_as_a_run(listening: str, tmp_path: Path) -> None:
    training = Training(listening)
    with training.tracer.start_as_current_span("megatron.startup.model_init"):
        pass
    training.step(10, 400.0, 5.0)
    training.export()
    training.step(11, 300.0, 4.0)
    training.step(12, 500.0, 3.0)
    training.skip()
    training.export()
    with training.tracer.start_as_current_span(
        "megatron.checkpoint.save", attributes={"megatron.iteration": 13}
    ):
        pass
    seen: dict[str, Any] = {}

    def arrived() -> (
        bool
    ):  # the agent sends in its own thread; before its first message, no rank has joined the run
        nonlocal seen
        state = cockpit(tmp_path, "snapshot")
        seen = state if isinstance(state, dict) else {"step": state}
        return seen["step"] == 13

    until(arrived)
    summary, (rank,) = seen["summary"], seen["ranks"]
    assert (seen["step"], seen["coverage"]) == (13, {"reporting": 1, "world": 1})
    assert (summary["loss"], summary["lr"], summary["grad_norm"], summary["step_ms"]) == (
        3.0,
        1e-4,
        1.5,
        400.0,
    )
    assert summary["tokens_per_s"] == pytest.approx(80_000.0) and summary["mfu"] is None
    assert rank["step"]["memory_bytes"] == 40.5 * 2**30 and rank["host"] == "node7"
    assert rank["step"]["phases"] == {} and rank["vitals"] is None and rank["pulse"]["cpu_percent"] is None
    assert seen["facts"] == {"service": "megatron-lm", "tp": 8, "steps": 20} and seen["knobs"] == []
    expected = ("model init took", "did not update the weights: 1", "saved a checkpoint of step 13")
    until(lambda: all(one in str(cockpit(tmp_path, "log")) for one in expected))

    refused = cockpit(tmp_path, "set", "lr_scale=0.5", "--wait")
    assert "lr_scale" in str(refused)
    stacks = cockpit(tmp_path, "stacks")
    assert "stacks" not in stacks or not stacks["stacks"], "the receiver's own stack is not the training's"
    training.close()
    (folder,) = tmp_path.glob("megatron-lm-*")
    assert (folder / "run.db").exists()


# ------------------------------------------------------------------------------------------ readings


def test_a_repeated_nan_is_no_new_step(noted: Noted) -> None:
    for _ in range(2):
        gauges = request(
            ("cockpit.train.step_ms", {"as_double": 5.0}), ("cockpit.train.loss", {"as_double": math.nan})
        )
        noted.take(gauges)
    assert len(noted.steps) == 1


def test_each_step_duration_is_counted_once(noted: Noted) -> None:
    noted.take(request((STEP_MS, {"count": 2, "sum": 200.0, "start_time_unix_nano": 7})))
    noted.take(request((STEP_MS, {"count": 2, "sum": 200.0, "start_time_unix_nano": 7})))  # no new step
    noted.take(request((STEP_MS, {"count": 3, "sum": 500.0, "start_time_unix_nano": 7})))
    noted.take(
        request((STEP_MS, {"count": 1, "sum": 50.0, "start_time_unix_nano": 9}))
    )  # the program was restarted
    noted.take(
        request((STEP_MS, {"count": 4, "sum": 80.0, "temporality": 1}))
    )  # the steps since the last export
    assert [(number, ms) for number, ms, _ in noted.steps] == [(2, 100.0), (3, 300.0), (4, 50.0), (8, 20.0)]


def test_gauges_of_several_steps_in_one_export_are_several_steps(noted: Noted) -> None:
    points = [
        (name, {"as_double": value, "time_unix_nano": at})
        for at in (5, 3, 4)
        for name, value in (("n", at), ("cockpit.train.step_ms", 10.0 * at), ("cockpit.train.loss", 1.0 / at))
    ]
    noted.take(request(*points))
    noted.take(request(*points[:3]))  # the last one again
    assert [(number, ms) for number, ms, _ in noted.steps] == [(3, 30.0), (4, 40.0), (5, 50.0)]
    assert [values["loss"] for _, _, values in noted.steps] == [1 / 3, 1 / 4, 1 / 5]


def test_hostile_numbers_are_left_out_and_a_nan_loss_is_shown(noted: Noted) -> None:
    nan, inf = float("nan"), float("inf")
    noted.take(
        request(
            (STEP_MS, {"count": 1, "sum": 10.0}),
            (LOSS, {"as_double": nan}),
            ("megatron.training.learning_rate", {"as_double": -inf}),
            ("megatron.training.tokens_per_sec", {"as_double": 1e300}),
            ("megatron.training.memory_allocated_gb", {"as_int": -(2**63)}),
            ("megatron.training.grad_norm", {}),
            ("unknown", {"as_double": 1.0}),
        )
    )
    noted.take(request((STEP_MS, {"count": 2**64 - 1, "sum": 1.0})))
    noted.take(request((STEP_MS, {"count": 5, "sum": nan})))
    noted.take(request((STEP_MS, {"count": 5, "sum": -5.0})))
    ((number, ms, values),) = noted.steps
    assert (number, ms, values.keys()) == (1, 10.0, {"loss", "loss_weight"}) and values["loss"] != values[
        "loss"
    ]


def test_a_step_number_that_is_not_legal_is_refused_not_changed(noted: Noted) -> None:
    for step_ms, number in enumerate((3.0, 1.5, -5.0, 2.0**60, 4.0), 10):
        noted.take(request(("cockpit.train.step_ms", {"as_int": step_ms}), ("n", {"as_double": number})))
    assert [number for number, *_ in noted.steps] == [3, 4]
    refused = [text.split(";")[0] for text in noted.events if "is not recorded" in text]
    assert refused == [f"step {number} is not recorded" for number in (1.5, -5.0, 2.0**60)]


def test_runs_end_and_are_limited(noted: Noted) -> None:
    for number in range(exported.MOST_RUNS):
        noted.take(request((STEP_MS, {"count": 1, "sum": 1.0}), run_id=str(number)))
    with pytest.raises(exported.RefusedError, match="8 programs export already"):
        noted.take(request((STEP_MS, {"count": 1, "sum": 1.0}), run_id="more"))
    noted.now_s = exported.LATE_S + 1
    noted.runs.end_old()
    assert noted.events.count("no export for 61 s") == exported.MOST_RUNS and not noted.closed
    noted.now_s = exported.SILENT_S + 1
    noted.runs.end_old()
    assert noted.closed == exported.MOST_RUNS
    with pytest.raises(exported.RefusedError, match="has ended"):
        noted.take(request((STEP_MS, {"count": 2, "sum": 2.0}), run_id="0"))


def test_the_end_of_training_ends_the_run_after_its_last_metrics(noted: Noted) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    traces = ExportTraceServiceRequest()
    resource = traces.resource_spans.add()
    resource.resource.attributes.add(key="nemo.run.id").value.string_value = "r"
    resource.scope_spans.add().spans.add(name="megatron.train", end_time_unix_nano=5 * 10**9)
    ((source, spans),) = spans_of(traces)
    noted.runs.note(source, spans)
    noted.runs.end_old()
    noted.take(request((STEP_MS, {"count": 1, "sum": 1.0})))
    assert len(noted.steps) == 1 and not noted.closed
    noted.now_s = exported.LAST_S + 1
    noted.runs.end_old()
    assert noted.closed == 1
