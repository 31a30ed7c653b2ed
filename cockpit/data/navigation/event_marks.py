"""Marks on curves, each at its step: applied changes, alerts, resumed runs, checkpoints, and marks that the user has
set."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from agents.alerts.finding import median
from agents.protocol import CommandState
from cockpit.data import format
from cockpit.data.curves.job_metrics import CurveMetric, change
from cockpit.data.curves.segments import Segment
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.log.outcomes import changes_text
from cockpit.data.log.run_log import Kind, LogEntry, log_entries
from cockpit.data.store import Store, Topic

AROUND = 16  # number of steps before and after a mark from which its effect is computed
FEWEST = 3  # minimum number of values on each side


@dataclass(frozen=True)
class MarkKind:
    """A kind of mark on the curves: its name, and the glyphs with which it is drawn. `vertical`: the glyph of the
    mark's vertical line in a chart; "" for marks that are shown only in the row of marks below the charts.
    """

    word: str
    glyph: str
    vertical: str = ""


CHANGE = MarkKind("change", "◆", "╷")
ALERT = MarkKind("alert", Level.WARN.value, "┊")
OVER = MarkKind("over", Level.GOOD.value)
RESUME = MarkKind("resumed", "↺", "┊")
CHECKPOINT = MarkKind("saved", "◇")
OWN = MarkKind("mark", "⚑", "╷")

_KINDS = {
    Kind.CHANGE: CHANGE,
    Kind.ALERT: ALERT,
    Kind.ENDED: OVER,
    Kind.RESUME: RESUME,
    Kind.CHECKPOINT: CHECKPOINT,
}


@dataclass(frozen=True)
class CurveMark:
    """A mark on the curves at one step. `estimated`: the step is estimated from the time of the log entry."""

    step: int
    kind: MarkKind
    text: str
    level: Level = Level.NOTE
    estimated: bool = False
    command: CommandState | None = None


def curve_marks(store: Store, own: Iterable[tuple[int, str]] = ()) -> list[CurveMark]:
    """The marks to draw on the curves, ordered by step: those of the run's log, and those in `own`, the (step, text)
    pairs of the user's marks."""
    logged = store.once("curve marks", (Topic.BOARD, Topic.EVENTS), lambda: _logged(store))
    mine = [CurveMark(step, OWN, format.clean(text)) for step, text in own]
    return sorted([*logged, *mine], key=lambda mark: mark.step) if mine else logged


def _logged(store: Store) -> list[CurveMark]:
    found = [_mark(entry, _KINDS[entry.kind]) for entry in log_entries(store) if _is_mark(entry)]
    return sorted((mark for mark in found if mark), key=lambda mark: mark.step)


def _is_mark(entry: LogEntry) -> bool:
    if entry.command:
        return entry.command.state == "applied"  # commands in other states changed nothing
    return entry.kind in _KINDS


def _mark(entry: LogEntry, kind: MarkKind) -> CurveMark | None:
    if entry.step is None:
        return None
    level = {"warning": Level.WARN, "error": Level.BAD}.get(entry.level, Level.NOTE)
    text = changes_of(entry) if entry.command else entry.text
    return CurveMark(entry.step, kind, text, level, entry.estimated, entry.command)


def changes_of(entry: LogEntry) -> str:
    """Text with the knob values that a command changed, who sent it, and why."""
    assert entry.command is not None
    reason = f" “{format.clean(entry.command.reason)}”" if entry.command.reason else ""
    return f"{changes_text(entry.command)} · {entry.source}{reason}"


def glyph_of(mark: CurveMark) -> str:
    """The glyph of a mark; an alert of level BAD has the glyph of that level."""
    return mark.level.value if mark.kind is ALERT and mark.level is Level.BAD else mark.kind.glyph


def around(found: Iterable[Segment], metric: CurveMetric, step: int) -> str:
    """The change of a metric at a step, such as ``2.31 → 4.02 (+74 %)``, from the medians over the steps before and
    after it; "" if too few steps have a value. A `~` marks a change that is computed from bucketed values."""
    before: list[float] = []
    after: list[float] = []
    rough = False
    for one in found:
        near = [
            (at, value)
            for at, value in one.points
            if step - AROUND * one.width <= at < step + AROUND * one.width
        ]
        rough = rough or (one.width > 1 and bool(near))
        before += [value for at, value in near if at < step]
        after += [value for at, value in near if at >= step]
    if min(len(before), len(after)) < FEWEST:
        return ""
    first, second = (_typical(values) * metric.factor for values in (before, after))
    text = f"{metric.text(first)} → {metric.with_unit(second)}"
    relative = change(first, second)
    return f"{'~' if rough else ''}{text}{f' ({relative})' if relative else ''}"


def _typical(values: list[float]) -> float:
    """The median; if a value is not finite, that value, which a median would hide."""
    return next((value for value in values if not math.isfinite(value)), median(values))
