"""Sends steps as OpenTelemetry gauges to a collector, over OTLP/HTTP.

Every step is a data point with the time of the step, so no step is lost between two exports.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import requests

from agents.protocol import Hello
from cockpit.export.curves import Point
from cockpit.export.mirror.delivery import Refusal, lasting_status

SCOPE = "cockpit"
PATH = "/v1/metrics"  # of OTLP over HTTP
PROTOBUF, JSON = "application/x-protobuf", "application/json"  # content types of answers


class _Reasons(logging.Handler):
    """Keeps the newest log message of the OpenTelemetry SDK, because it says why an export failed."""

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()


class OtlpWriter:
    """Sends steps to an OpenTelemetry collector. `endpoint`: the collector's URL, such as ``http://localhost:4318``. If
    `endpoint` is None, the SDK takes the URL from its environment variables, such as ``OTEL_EXPORTER_OTLP_ENDPOINT``,
    or else uses ``http://localhost:4318``."""

    def __init__(self, endpoint: str | None, hello: Hello) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.resources import Resource

        self._reasons = _Reasons()
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(self._reasons)
        logger.propagate = False  # the reason is part of the error; the log would repeat it on the terminal
        self._answers: list[requests.Response] = []  # to the last request and its repetitions
        self._accepted = False  # whether the collector has accepted data points
        self.rejected = 0  # data points that it has rejected since; they are not sent again, as OTLP requires
        session = requests.Session()
        session.hooks["response"].append(self._keep)
        self._exporter = OTLPMetricExporter(endpoint and endpoint.rstrip("/") + PATH, session=session)
        self._resource = Resource.create(
            {"service.name": SCOPE, "cockpit.run": hello.run, "cockpit.simulated": hello.simulated}
        )

    def _keep(self, answer: requests.Response, *_: Any, **__: Any) -> None:
        self._answers.append(answer)

    def write(self, points: Iterable[Point]) -> int:
        """Raises Refusal if the collector does not accept the steps even after the SDK's retries."""
        from opentelemetry.sdk.metrics import export
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        values: defaultdict[str, list[export.NumberDataPoint]] = defaultdict(list)
        for summary, numbers in points:
            at = int(summary.time_s * 1e9)
            # The step is a gauge of its own: as an attribute, it would make each step a new time series.
            for tag, value in {"step": summary.step, **numbers}.items():
                number = int(value) if isinstance(value, bool) else value
                values[f"cockpit.{tag.replace('/', '.')}"].append(export.NumberDataPoint({}, at, at, number))
        if not values:
            return 0
        metrics = [
            export.Metric(name, None, None, export.Gauge(of_metric)) for name, of_metric in values.items()
        ]
        scope = export.ScopeMetrics(InstrumentationScope(SCOPE), metrics, "")
        data = export.MetricsData([export.ResourceMetrics(self._resource, [scope], "")])
        self._answers.clear()
        accepted = self._exporter.export(data) is export.MetricExportResult.SUCCESS
        answer = self._answers[-1] if self._answers else None
        if not accepted:
            raise Refusal(self._reasons.last, answer is not None and lasting_status(answer.status_code))
        count = sum(map(len, values.values()))
        rejected, why = rejected_points(answer) if answer is not None else (0, "")
        if rejected >= count and not self._accepted:
            raise Refusal(f"the collector has rejected all data points: {why or 'it gives no reason'}", True)
        self._accepted = True
        self.rejected += rejected
        return count - rejected

    def close(self) -> None:
        self._exporter.shutdown()


def rejected_points(answer: requests.Response) -> tuple[int, str]:
    """How many data points a collector has rejected, and why. Raises Refusal if `answer` is not that of a collector.

    The SDK regards every answer with status 200 as a success.
    """
    from google.protobuf import json_format
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

    kind = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    try:
        if not answer.content:
            return 0, ""
        if kind == JSON:
            partial = json_format.Parse(answer.content, ExportMetricsServiceResponse()).partial_success
        elif kind in ("", PROTOBUF):
            partial = ExportMetricsServiceResponse.FromString(answer.content).partial_success
        else:
            raise Refusal(
                f"{answer.url} answers with {kind[:60]}, so it is not an OpenTelemetry collector", True
            )
    except (DecodeError, json_format.ParseError):
        raise Refusal(f"{answer.url} does not answer like an OpenTelemetry collector", True) from None
    return partial.rejected_data_points, partial.error_message
