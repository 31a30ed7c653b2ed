"""Shows each program that exports metrics as a run. Each export with new step durations becomes one step.

The steps go through `agents.join`, so hub, recording, screens and scripts see an ordinary run. The run has one rank,
the rank that exports, and no knobs, because OpenTelemetry sends nothing back to the program.
"""

import time
from collections.abc import Callable, Sequence

import agents
from agents.protocol import CHECKPOINT_STEP
from cockpit.export.incoming.exports import (
    MOST,
    SAVE_SPAN,
    STARTUP_SPANS,
    STEP_SPAN,
    TRAINING_SPAN,
    Reading,
    Source,
    Span,
)

IDLE = "between exports"  # operation of the rank; it may take any time
LATE, LATE_S = 5, 60.0  # intervals, and the least time, after which a missing export is logged
SILENT_S = 1800.0  # a run ends after this long without an export
LAST_S = 10.0  # a run ends this long after its training; its last metrics may come after its last span
MOST_RUNS = 8
GATHERED = ("loss", "grad_norm", "lr", "mfu", "memory_bytes")


class RefusedError(Exception):
    """Raised if the telemetry that a program exports cannot be shown; the message says why."""


class ExportedRun:
    """The run in which the telemetry of one external program is shown. Its methods are called in the thread that
    created the object."""

    def __init__(self, source: Source, name: str, now_s: float) -> None:
        self._loop = agents.join(name, host=source.host, facts=source.facts, first_step=1)
        self._values: dict[str, float] = {}  # of exports without a step
        self._gauges: dict[str, float] = {}  # of the last reading without a histogram
        self._durations: tuple[int, float] = (0, 0.0)
        self._began: int | None = None
        self._skipped = 0.0
        self._step, self._iteration = 0, 0
        self._refused = False  # whether the step of a span was refused, which is reported once
        self._heard_s, self._interval_s = now_s, 0.0
        self._ended_s: float | None = None
        self._late = False
        self._loop.event(f"receives the exports of {source.service} on {source.host}")
        self._loop.at(0, IDLE)

    def take(self, readings: Sequence[Reading], now_s: float) -> None:
        """Report one step to the hub for each reading that contains new step durations."""
        self._interval_s, self._heard_s, self._late = now_s - self._heard_s, now_s, False
        for reading in readings:
            self._values |= reading.values
            count, total_ms = self._new_durations(reading)
            if count:
                self._send(count, total_ms / count)

    def _new_durations(self, reading: Reading) -> tuple[int, float]:
        """Count and sum of the step durations that earlier readings did not contain."""
        if reading.durations is None:  # no histogram: a gauge has the duration of the newest step
            # An exporter may send the last values again. The comparison as text also finds an equal NaN.
            again = repr(reading.values) == repr(self._gauges)
            self._gauges = reading.values
            known = reading.values.get("step_ms")
            return (0, 0.0) if known is None or again else (1, known)
        if reading.began is None:
            return reading.durations
        before = self._durations if reading.began == self._began else (0, 0.0)
        self._durations, self._began = reading.durations, reading.began
        return max(0, reading.durations[0] - before[0]), max(0.0, reading.durations[1] - before[1])

    def _send(self, count: int, step_ms: float) -> None:
        values, self._values = self._values, {}
        report = self._loop.begin(values.get("step") or max(self._iteration, self._step + count))
        number = report.number
        if report.recorded:
            if number <= self._step:  # a resumed training counts from its checkpoint
                self._loop.event(f"the training continues at step {number}, after step {self._step}")
            self._step = number
        report.report(**{name: values[name] for name in GATHERED if name in values}, loss_weight=1)
        if "tokens_per_s" in values:
            report.report(tokens=values["tokens_per_s"] * step_ms / 1e3)
        self._loop.end(report, step_ms)
        self._loop.at(number, IDLE)
        skipped = values.get("skipped", self._skipped)
        if skipped > self._skipped:
            self._loop.event(f"steps so far that did not update the weights: {skipped:g}", "warning")
        self._skipped = skipped

    def note(self, spans: Sequence[Span], now_s: float) -> None:
        """Keep the number of the newest step that `spans` contains, and report start-up, checkpoints and the end of
        training as events."""
        self._heard_s = now_s
        for span in spans:
            step = span.step
            if step is not None and not 0 <= step <= MOST:
                step = None
                if not self._refused:
                    self._refused = True
                    text = f"a span has the step {span.step}, which is not used; legal: 0 to {MOST}"
                    self._loop.event(text, "error")
            if span.name == STEP_SPAN:
                self._iteration = step or self._iteration
            elif span.name == SAVE_SPAN:
                facts = {CHECKPOINT_STEP: step} if step else {}
                where = f" of step {step}" if step else ""
                self._loop.event(f"saved a checkpoint{where} in {span.seconds:.1f} s", facts=facts)
            elif span.name == TRAINING_SPAN:
                self._loop.event(f"training has ended after {span.seconds:.0f} s")
                self._ended_s = now_s
            else:
                part = span.name.removeprefix(STARTUP_SPANS).replace("_", " ")
                self._loop.event(f"start-up: {part} took {span.seconds:.1f} s")

    def over(self, now_s: float) -> bool:
        """Whether the run has ended: its training has ended, or it has been silent for too long."""
        silent_s = now_s - self._heard_s
        if silent_s > max(LATE_S, LATE * self._interval_s) and not self._late and self._ended_s is None:
            self._late = True
            self._loop.event(f"no export for {silent_s:.0f} s", "warning")
        return silent_s > SILENT_S or (self._ended_s is not None and now_s - self._ended_s > LAST_S)

    def close(self) -> None:
        """End the run."""
        self._loop.close()


class ExportedRuns:
    """One run for each external program that exports telemetry. `name`: the name of every run; if it is "", a run is
    named after its program's OpenTelemetry `service.name`. `opened` is called with the name of a new run.
    """

    def __init__(
        self,
        name: str,
        opened: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._opened, self._clock = name, opened, clock
        self._runs: dict[Source, ExportedRun] = {}
        self._over: set[Source] = set()

    def take(self, source: Source, readings: Sequence[Reading]) -> None:
        """Raises RefusedError if the readings cannot be shown."""
        self._run(source).take(readings, self._clock())

    def note(self, source: Source, spans: Sequence[Span]) -> None:
        """Raises RefusedError if the spans cannot be shown."""
        self._run(source).note(spans, self._clock())

    def _run(self, source: Source) -> ExportedRun:
        if run := self._runs.get(source):
            return run
        if source in self._over:
            raise RefusedError(f"the run of {source.service} has ended")
        if len(self._runs) >= MOST_RUNS:
            raise RefusedError(f"{MOST_RUNS} programs export already, so {source.service} is not shown")
        name = self._name or source.service
        run = self._runs[source] = ExportedRun(source, name, self._clock())
        self._opened(name)
        return run

    def end_old(self) -> None:
        """End the runs whose programs have ended or are silent. If a program without a run id exports again later, it
        is shown as a new run."""
        for source, run in list(self._runs.items()):
            if run.over(self._clock()):
                run.close()
                del self._runs[source]
                if source.run_id:
                    self._over.add(source)

    def close(self) -> None:
        for run in self._runs.values():
            run.close()
        self._runs.clear()
