"""The state of a run in one to five lines of text, for a status bar."""

import math
from collections.abc import Callable, Sequence

from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import diagnosis
from cockpit.data.diagnosis.statement import Level
from cockpit.data.diagnosis.status import StatusField, fitting, state_field, status_fields
from cockpit.data.log.run_log import log_entries
from cockpit.data.store import Store

GLYPHS = "▁▂▃▄▅▆▇█"
SPARK_STEPS = 24  # number of newest steps in a sparkline
MOST_LINES = 5

Line = tuple[Level, str]
"""A line of text with its severity."""


def status_lines(store: Store, count: int, width: int) -> list[Line]:
    """The first `count` lines, each cut to `width` columns: state, diagnosis, curves, traffic, newest log entry."""
    return [(level, cut(text, width)) for level, text in (make(store, width) for make in LINES[:count])]


def cut(text: str, width: int) -> str:
    """The text, truncated to `width` columns; truncated text ends with `…`."""
    text = format.clean(text)
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def _state(store: Store, width: int) -> Line:
    """The first line: the state of the run and the most important status fields that fit in `width` columns."""
    fields = [state_field(store), *status_fields(store, operator=None)]
    fields = fitting(fields, lambda kept: len(_joined(kept)) <= width)
    return fields[0].level or Level.NOTE, _joined(fields)


def _joined(fields: Sequence[StatusField]) -> str:
    level = fields[0].level or Level.NOTE
    return f"{level.value} {' · '.join(field.text.strip() for field in fields)}"


def _diagnosis(store: Store, width: int) -> Line:
    found = diagnosis(store)
    return found.level, f"{found.level.value} {found.sentence}"


def _curves(store: Store, width: int) -> Line:
    """Sparklines of loss and step time over the newest steps."""
    recent = store.state.summaries[-SPARK_STEPS:]
    if not recent:
        return Level.NOTE, f"{format.MISSING} no step yet"
    loss, newest = recent[-1].loss, recent[-1]
    spelled = format.MISSING if loss is None else f"{loss:.3f}"
    validated = store.state.newest("validation_loss")
    parts = [
        f"loss {sparkline([one.loss for one in recent])} {spelled}",
        *([f"validation {validated[1]:.3f} at step {validated[0]}"] if validated else []),
        f"step {sparkline([one.step_ms for one in recent])} {format.duration_ms(newest.step_ms).strip()}",
    ]
    return Level.NOTE, f"{'  '.join(parts)}  last {len(recent)} steps"


def sparkline(values: Sequence[float | None]) -> str:
    """One glyph per value, scaled from the lowest to the highest finite value; `·` for a missing value."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return format.MISSING * len(values)
    low, high = min(finite), max(finite)
    span = (high - low) or 1.0
    return "".join(
        GLYPHS[round((value - low) / span * (len(GLYPHS) - 1))]
        if value is not None and math.isfinite(value)
        else format.MISSING
        for value in values
    )


def _traffic(store: Store, width: int) -> Line:
    """The line on communication: exposed milliseconds by axis, the pipeline bubble, and the load of the hottest expert
    relative to the mean."""
    summary = store.summary
    if summary is None or not summary.comm:
        return Level.NOTE, f"{format.MISSING} no traffic reported"
    exposed = [f"{axis} {one.exposed_ms:.0f}" for axis, one in summary.comm.items() if one.bytes]
    text = f"exposed ms: {' '.join(exposed) or 'none'}"
    if summary.bubble is not None:
        text += f" · bubble {format.percent(summary.bubble).strip()}"
    if summary.load_max_over_mean is not None:
        text += f" · hottest expert {summary.load_max_over_mean:.2f}×"
    return Level.NOTE, text


_LEVELS = {"info": Level.NOTE, "warning": Level.WARN, "error": Level.BAD}


def _newest_entry(store: Store, width: int) -> Line:
    entries = log_entries(store)
    if not entries:
        return Level.NOTE, f"{format.MISSING} no events yet"
    level = _LEVELS.get(entries[-1].level, Level.NOTE)
    return level, f"{level.value} {entries[-1].headline} · {entries[-1].source}"


LINES: tuple[Callable[[Store, int], Line], ...] = (_state, _diagnosis, _curves, _traffic, _newest_entry)
