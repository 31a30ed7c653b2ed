"""Decodes what a program exports with OpenTelemetry: metrics and spans of training, recognised by name.

Exports are untrusted: only known names are read, and each number is checked.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agents.protocol import Value, clean

GIB = 2**30
MOST = 2**53  # highest number of a step or a count
TEXT = 64  # maximum length of a name or an attribute
MOST_TIMES = 1024  # most points in time of one export; an exporter sends one
CUMULATIVE = 2  # AGGREGATION_TEMPORALITY_CUMULATIVE
NO_VALUE = 1  # DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK


class ExportError(ValueError):
    """Raised if an export cannot be used because it exceeds a limit; the message is one sentence."""


@dataclass(frozen=True)
class Quantity:
    """The meaning of an exported metric: a field of `FIELDS`, and the factor that converts it to the unit of that
    field."""

    field: str
    factor: float = 1.0


FIELDS = {
    "step": "number of the step",
    "step_ms": "duration of a step in milliseconds; a histogram, or a gauge",
    "loss": "loss",
    "grad_norm": "norm of the gradient",
    "lr": "learning rate",
    "tokens_per_s": "tokens per second of the whole job",
    "memory_bytes": "peak memory of the GPU in bytes",
    "mfu": "model FLOPs utilisation, 0 to 1",
    "skipped": "number of skipped steps so far",
}
"""What a metric can mean."""

MEGATRON = "megatron.training."
OURS = "cockpit.train."  # of `cockpit mirror --to otlp`
METRICS: Mapping[str, Quantity] = {
    f"{MEGATRON}step_duration_ms": Quantity("step_ms"),
    f"{MEGATRON}loss": Quantity("loss"),
    f"{MEGATRON}grad_norm": Quantity("grad_norm"),
    f"{MEGATRON}learning_rate": Quantity("lr"),
    f"{MEGATRON}tokens_per_sec": Quantity("tokens_per_s"),
    f"{MEGATRON}memory_allocated_gb": Quantity("memory_bytes", GIB),
    f"{MEGATRON}skipped_iters": Quantity("skipped"),
    "cockpit.step": Quantity("step"),
    **{
        f"{OURS}{name}": Quantity(name)
        for name in ("step_ms", "loss", "grad_norm", "lr", "tokens_per_s", "mfu")
    },
}
"""The metrics of Megatron-LM and of a mirror of another run, by name."""

ITERATION = "megatron.iteration"  # attribute of a span
STEP_SPAN, TRAINING_SPAN, SAVE_SPAN = "megatron.train.iteration", "megatron.train", "megatron.checkpoint.save"
STARTUP_SPANS = "megatron.startup."

RUN_IDS = ("nemo.run.id", "nemo.lens.run_uuid", "service.instance.id")
FACTS = {
    "service.name": "service",
    "service.version": "service version",
    "dl.tensor_parallel.size": "tp",
    "dl.pipeline_parallel.size": "pp",
    "dl.data_parallel.size": "dp",
    "dl.batch_size": "global batch",
    "dl.sequence_length": "sequence",
    "dl.gpu.name": "gpu",
    "megatron.num_layers": "layers",
    "megatron.hidden_size": "hidden size",
    "megatron.precision": "precision",
    "megatron.train_iters": "steps",
    "slurm.job.id": "slurm job",
}
"""Attributes of a resource that are shown as facts of the run, and the names of the facts."""


@dataclass(frozen=True)
class Source:
    """The program that sent an export. Two exports with the same `service` and `run_id` belong to the same run."""

    service: str
    run_id: str
    host: str = field(compare=False)
    facts: dict[str, Value] = field(compare=False)


@dataclass
class Reading:
    """The values that a program exported for one point in time, by field, in the units of `FIELDS`. `durations`: count
    and sum of a histogram of step durations, in ms: cumulative since the start time `began`, or since the last export
    if `began` is None.
    """

    values: dict[str, float] = field(default_factory=dict)
    durations: tuple[int, float] | None = None
    began: int | None = None


@dataclass(frozen=True)
class Span:
    """A completed span with a known name. `step`: the number of the training step, if the span has one."""

    name: str
    seconds: float
    step: int | None = None


def metrics_of(request: Any, names: Mapping[str, Quantity]) -> Iterator[tuple[Source, list[Reading]]]:
    """The readings of an `ExportMetricsServiceRequest`, sorted by time. `names` maps each metric name that is read to
    its meaning; other metrics are ignored. Raises ExportError."""
    for resource in request.resource_metrics:
        readings: dict[int, Reading] = {}
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                if quantity := names.get(metric.name):
                    _read(metric, quantity, readings)
        if readings:
            yield source_of(resource.resource), [readings[at] for at in sorted(readings)]


def _read(metric: Any, quantity: Quantity, readings: dict[int, Reading]) -> None:
    kind = metric.WhichOneof("data")
    if kind in ("gauge", "sum"):
        for point in getattr(metric, kind).data_points:
            number = point.WhichOneof("value")
            if number is None or point.flags & NO_VALUE:
                continue
            value = quantity.factor * float(getattr(point, number))
            if _legal(quantity.field, value):
                _at(point, readings).values[quantity.field] = value
    elif kind in ("histogram", "exponential_histogram") and quantity.field == "step_ms":
        histogram = getattr(metric, kind)
        cumulative = histogram.aggregation_temporality == CUMULATIVE
        for point in histogram.data_points:
            total = quantity.factor * point.sum
            if point.count <= MOST and 0 <= total < MOST:
                reading = _at(point, readings)
                count, before = reading.durations or (0, 0.0)  # of points with other attributes
                reading.durations = count + point.count, before + total
                reading.began = point.start_time_unix_nano if cumulative else None


def _at(point: Any, readings: dict[int, Reading]) -> Reading:
    """The reading at the time of `point`; if `readings` has none, an empty reading is added. Raises ExportError if the
    export has too many different timestamps."""
    reading = readings.setdefault(point.time_unix_nano, Reading())
    if len(readings) > MOST_TIMES:
        raise ExportError(f"an export has at most {MOST_TIMES} points in time for each program")
    return reading


def _legal(name: str, value: float) -> bool:
    if name in ("loss", "grad_norm", "step"):
        return True  # a NaN is shown, because it is a finding; an illegal step is refused by the loop
    return math.isfinite(value) and 0 <= value < (2**63 if name == "memory_bytes" else MOST)


def spans_of(request: Any) -> Iterator[tuple[Source, list[Span]]]:
    """For each resource of an `ExportTraceServiceRequest`, yield its source and its spans with known names, ordered by
    end time."""
    for resource in request.resource_spans:
        known = [
            span
            for scope in resource.scope_spans
            for span in scope.spans
            if span.name in (STEP_SPAN, TRAINING_SPAN, SAVE_SPAN) or span.name.startswith(STARTUP_SPANS)
        ]
        known.sort(key=lambda span: span.end_time_unix_nano)
        if known:
            yield source_of(resource.resource), [_span(span) for span in known]


def _span(span: Any) -> Span:
    seconds = max(0, span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    number = next((one.value.int_value for one in span.attributes if one.key == ITERATION), None)
    if number is not None and span.name == STEP_SPAN:
        number += 1  # Megatron counts the steps before the one of this span
    return Span(clean(span.name[:TEXT]), seconds, number)


def source_of(resource: Any) -> Source:
    """The program that an OpenTelemetry resource describes."""
    known = dict(_attributes(resource.attributes))
    run_id = next((str(known[name]) for name in RUN_IDS if name in known), "")
    facts = {FACTS[name]: value for name, value in known.items() if name in FACTS}
    service = str(known.get("service.name", "")) or "opentelemetry"
    return Source(service, run_id, str(known.get("host.name", "")) or "opentelemetry", facts)


def _attributes(attributes: Iterable[Any]) -> Iterator[tuple[str, Value]]:
    """The attributes that this module uses, as numbers or as text without control characters. Other attributes are
    left out."""
    used = {*FACTS, *RUN_IDS, "host.name"}
    for one in attributes:
        if one.key not in used:
            continue
        kind = one.value.WhichOneof("value")
        if kind == "string_value":
            yield one.key, clean(one.value.string_value[:TEXT])
        elif kind == "int_value" and abs(one.value.int_value) <= MOST:
            yield one.key, one.value.int_value
        elif kind == "bool_value":
            yield one.key, one.value.bool_value
