"""Sends steps as OpenTelemetry gauges to a collector, over OTLP/HTTP.

Every step is a data point with the time of the step, so no step is lost between two exports.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable

from agents.protocol import Hello
from cockpit.export.curves import Point

SCOPE = "cockpit"
PATH = "/v1/metrics"  # of OTLP over HTTP


class OtlpError(Exception):
    """The collector did not accept the steps."""


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
        self._exporter = OTLPMetricExporter(endpoint and endpoint.rstrip("/") + PATH)
        self._resource = Resource.create(
            {"service.name": SCOPE, "cockpit.run": hello.run, "cockpit.simulated": hello.simulated}
        )

    def write(self, points: Iterable[Point]) -> int:
        """Raises OtlpError if the collector does not accept the steps even after the SDK's retries."""
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
        if self._exporter.export(data) is not export.MetricExportResult.SUCCESS:
            raise OtlpError(self._reasons.last)
        return sum(map(len, values.values()))

    def close(self) -> None:
        self._exporter.shutdown()
