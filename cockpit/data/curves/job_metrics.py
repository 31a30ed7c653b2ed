"""Metrics of the whole job that have a curve, with their titles, units and number formats."""

import math
from dataclasses import dataclass

from agents.protocol import Summary
from agents.state.metric_curves import METRICS
from agents.state.run_state import RunState
from cockpit.data import format


@dataclass(frozen=True)
class CurveMetric:
    """One metric. `key` is the name of the metric's field in `Summary`; `factor` converts the field's value to
    `unit`."""

    key: str
    title: str
    unit: str = ""
    factor: float = 1.0
    about: str = ""
    digits: int = 3  # decimals of a value below 1000

    def of(self, summary: Summary) -> float | None:
        """The metric's value in a summary, converted to `unit`."""
        value = getattr(summary, self.key)
        return None if value is None else float(value) * self.factor

    def text(self, value: float | None) -> str:
        """A value without its unit, such as ``2.113`` or ``19.9 k``."""
        return number(value, self.digits)

    def with_unit(self, value: float | None) -> str:
        """A value with its unit, such as ``412.0 ms`` or ``4.2 MB``."""
        text = self.text(value)
        return (
            f"{text}{self.unit}"
            if self.unit == "B" and text[-1:] in "kMGT"
            else f"{text} {self.unit}".rstrip()
        )


CURVE_METRICS = (
    CurveMetric("loss", "Loss", about="loss of the job"),
    CurveMetric("grad_norm", "Gradient norm", about="norm of the gradient before clipping"),
    CurveMetric("step_ms", "Step time", "ms", about="step time of the slowest rank", digits=1),
    CurveMetric("tokens_per_s", "Throughput", "tok/s", about="tokens a second of the whole job", digits=1),
    CurveMetric("lr", "Learning rate", about="learning rate after schedule and lr_scale"),
    CurveMetric("bubble", "Bubble", "%", 100.0, "share of the pipeline's time without work", 1),
    CurveMetric("mfu", "MFU", "%", 100.0, "FLOP/s of the model over the peak of the devices", 1),
    CurveMetric(
        "load_max_over_mean", "Expert load, max/mean", "x", about="most loaded expert over the mean", digits=2
    ),
    CurveMetric(
        "dropped",
        "Dropped pairs",
        about="token-expert pairs dropped because their expert was over capacity",
        digits=0,
    ),
    CurveMetric(
        "a2a_bytes", "All-to-all", "B", about="bytes of all-to-all traffic of the job per step", digits=0
    ),
    CurveMetric("validation_loss", "Validation loss", about="loss of a text that the run does not train on"),
    CurveMetric(
        "replica_bytes",
        "Between replicas",
        "B",
        about="bytes that replicas send to sum gradients, after compression",
        digits=0,
    ),
    CurveMetric("loss_scale", "Loss scale", about="factor on the loss before backward, with fp16", digits=0),
    CurveMetric(
        "skipped_steps", "Skipped steps", about="steps so far that did not update the weights", digits=0
    ),
)
"""The metrics in the order in which the screen shows them."""

BY_KEY = {metric.key: metric for metric in CURVE_METRICS}
assert set(BY_KEY) == set(METRICS)


def reported(state: RunState) -> list[CurveMetric]:
    """The metrics for which the run has at least one value."""
    return [
        metric
        for metric in CURVE_METRICS
        if metric.key in state.curve.series
        or any(getattr(summary, metric.key) is not None for summary in reversed(state.summaries))
    ]


def number(value: float | None, digits: int = 3) -> str:
    """A value as text, such as ``2.113``, ``1 163``, ``19.9 k`` or ``3.00e-04``, with a width that rarely changes from
    step to step."""
    if value is None or math.isnan(value):
        return format.MISSING if value is None else "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    size = abs(value)
    if 1000 <= size < 1e15:
        return format.grouped(value) if size < format.SPELLED else format.si(value)
    if value == 0 or 0.01 <= size < 1000:
        return f"{value:.{digits if size < 100 else min(digits, 1)}f}"
    return f"{value:.2e}"


def change(before: float, after: float) -> str:
    """The relative change, such as ``+5.9 %``; "" if it is meaningless because `before` is zero or the sign changes."""
    if not before or not math.isfinite(before) or not math.isfinite(after) or before * after < 0:
        return ""
    share = round(after / before - 1, 3) + 0.0  # adding 0.0 avoids "-0.0 %"
    return f"x{after / before:.1f}" if share >= 10 else f"{100 * share:+.1f} %"
