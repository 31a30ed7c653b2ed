"""Builds OpenTelemetry exports for tests of `cockpit listen`. The tests replace the object that `agents.join` returns
with a fake (`Noted`), which records the steps that the receiver derives from the exports."""

from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)

from agents.loop.loop import step_number
from cockpit.export.incoming import runs as exported
from cockpit.export.incoming.exports import METRICS, Quantity, metrics_of
from cockpit.export.incoming.receiver import Receiver
from cockpit.export.incoming.runs import ExportedRuns

PROTOBUF = "application/x-protobuf"
DEADLINE_S = 30.0


class Noted:
    """Replaces the loop object that `agents.join` returns; records the steps and events that it is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[int, float, dict[str, Any]]] = []
        self.events: list[str] = []
        self.now_s, self.closed = 0.0, 0
        monkeypatch.setattr(exported.agents, "join", lambda *_, **__: self)
        self.runs = ExportedRuns("", lambda _: None, lambda: self.now_s)
        self.receiver = Receiver(self.runs, {**METRICS, "n": Quantity("step")})

    def begin(self, number: float) -> Any:
        self._values: dict[str, Any] = {}
        self.recorded, self.number = True, 0
        try:
            self.number = step_number(number, 0)
        except ValueError as error:
            self.recorded = False
            self.event(str(error))
        return self

    def report(self, **values: Any) -> None:
        self._values |= values

    def end(self, _: object, step_ms: float) -> None:
        if self.recorded:
            self.steps.append((self.number, step_ms, self._values))

    def event(self, text: str, level: str = "info", facts: object = None) -> None:
        self.events.append(text)

    def at(self, *_: object) -> None:
        pass

    def close(self) -> None:
        self.closed += 1

    def take(self, request: Any) -> None:
        for source, readings in metrics_of(request, self.receiver._names):
            self.runs.take(source, readings)


def request(*points: tuple[str, dict[str, Any]], run_id: str = "r") -> Any:
    """An export request: points with `count` and `sum` become histograms, and points with `as_double` or `as_int`
    become gauges."""
    export = ExportMetricsServiceRequest()
    resource = export.resource_metrics.add()
    resource.resource.attributes.add(key="nemo.run.id").value.string_value = run_id
    metrics = resource.scope_metrics.add().metrics
    for name, values in points:
        temporality = values.pop("temporality", 2)
        metric = metrics.add(name=name)
        if "count" in values:
            metric.histogram.aggregation_temporality = temporality
            metric.histogram.data_points.add(**values)
        else:
            metric.gauge.data_points.add(**values)
    return export


STEP_MS, LOSS = "megatron.training.step_duration_ms", "megatron.training.loss"
