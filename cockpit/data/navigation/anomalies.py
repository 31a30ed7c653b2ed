"""Anomalies, in this order: alerts (most severe first), lost ranks without an alert, outlying ranks, dead and hot
experts, and the slowest step.

Each anomaly names the screen that shows it, and the rank, expert or step to select on that screen.
"""

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice

from agents.alerts.finding import by_severity
from agents.protocol import Alert
from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import LOST, Level
from cockpit.data.experts import shown, since_text, unwell
from cockpit.data.history.experts import Health
from cockpit.data.metrics import Metric, available, median, read
from cockpit.data.ranks.rank_levels import levels_of
from cockpit.data.store import Store, Topic

MOST = 64  # maximum number of anomalies of one kind; the grid and the map show all of them at once
SLOW_STEP = 1.25  # a step is an anomaly if it takes at least this many times the median step time

SCREENS = {
    **dict.fromkeys(
        ("failed", "lost", "silent", "unheard", "absent", "stall", "straggler", "throttle", "memory"), "ranks"
    ),
    **dict.fromkeys(("collapse", "drops", "dead_experts"), "experts"),
    **dict.fromkeys(("nan", "loss_spike", "gradient_spike", "slowdown"), "curves"),
}
"""The screen on which an alert can be seen, by the alert's name; all other alerts are seen in the log."""

_LAYER = re.compile(r"\blayer (\d{1,6})\b")
_EXPERT = re.compile(r"\bexperts? (\d{1,6})\b")


@dataclass(frozen=True)
class Anomaly:
    """One anomaly. `key` stays the same while the anomaly lasts, although its numbers change."""

    key: tuple[object, ...]
    level: Level
    text: str
    screen: str
    rank: int | None = None
    layer: int | None = None
    expert: int | None = None
    step: int | None = None


def anomalies(store: Store, metric_key: str = "", among: Collection[int] | None = None) -> list[Anomaly]:
    """The anomalies of a run, most severe first. `metric_key`: the metric whose outliers are included ("": the first
    metric); `among`: the ranks that the filter selects, None for all."""
    also = metric_key, None if among is None else frozenset(among)
    return store.once("anomalies", tuple(Topic), lambda: _anomalies(store, metric_key, among), also)


def _anomalies(store: Store, metric_key: str, among: Collection[int] | None) -> list[Anomaly]:
    found = [*_alerts(store), *_lost(store)]
    named = {one.rank for one in found if one.rank is not None}
    metrics = available(store)
    metric = next((one for one in metrics if one.key == metric_key), metrics[0])
    found += (one for one in _outliers(store, metric) if one.rank not in named)
    found = [one for one in found if among is None or one.rank is None or one.rank in among]
    named_experts = {(one.layer, one.expert) for one in found if one.expert is not None}
    found += (one for one in _experts(store) if (one.layer, one.expert) not in named_experts)
    return found + list(_slowest_step(store))


def next_anomaly(
    found: list[Anomaly], after: tuple[object, ...] | None, by: int
) -> tuple[int, Anomaly] | None:
    """Starting at the anomaly with the key `after`, move `by` positions through the list, wrapping around, and return
    the index and the anomaly there. If no anomaly has this key any more, the result is the first anomaly or, for a
    negative `by`, the last. None if there are no anomalies.
    """
    if not found:
        return None
    keys = [one.key for one in found]
    at = (keys.index(after) + by) % len(found) if after in keys else (0 if by > 0 else len(found) - 1)
    return at, found[at]


def _alerts(store: Store) -> Iterator[Anomaly]:
    for alert in by_severity(store.state.alerts.values()):
        level = Level.BAD if alert.level == "error" else Level.WARN
        screen = SCREENS.get(alert.name, "log")
        layer, expert = _layer_and_expert(alert, store) if screen == "experts" else (None, None)
        step = alert.evidence.get("step")
        yield Anomaly(
            ("alert", alert.name, alert.subject),
            level,
            format.clean(alert.text),
            screen,
            rank=alert.ranks[0] if alert.ranks else None,
            layer=layer,
            expert=expert,
            step=step if isinstance(step, int) and screen == "curves" else None,
        )


def _layer_and_expert(alert: Alert, store: Store) -> tuple[int | None, int | None]:
    """The first layer and the first expert mentioned in the alert's text. Both are None if no layer of the run is
    mentioned; the expert is None if no expert of this layer is mentioned. The text is parsed because an alert has no
    fields for layer and expert.
    """
    layer, expert = (pattern.search(alert.text) for pattern in (_LAYER, _EXPERT))
    loads = {one.layer: len(one.load) for one in store.state.experts.layers} if store.state.experts else {}
    if layer is None or int(layer.group(1)) not in loads:
        return None, None
    number = int(layer.group(1))
    if expert is None or int(expert.group(1)) >= loads[number]:
        return number, None
    return number, int(expert.group(1))


def _lost(store: Store) -> Iterator[Anomaly]:
    """Lost ranks that are not listed in any alert: an alert lists only the first 64 ranks, and is raised only some time
    after a rank is lost."""
    alerted = {rank for alert in store.state.alerts.values() for rank in alert.ranks}
    lost = (rank for rank, gone in store.state.gone.items() if not gone.clean and rank not in alerted)
    for rank in islice(lost, MOST):
        gone = store.state.gone[rank]
        why = f": {format.clean(gone.text)}" if gone.text else ""
        yield Anomaly(
            ("lost", rank), Level.BAD, f"{store.name(rank)} {LOST[gone.process]}{why}", "ranks", rank
        )


def _outliers(store: Store, metric: Metric) -> Iterator[Anomaly]:
    readings = read(store, metric)
    levels = levels_of(store, metric, readings)
    marked = [rank for rank, level in levels.items() if level is Level.WARN]
    marked.sort(key=lambda rank: -readings[rank].deviation * (metric.worse or 1))
    for rank in marked[:MOST]:
        reading = readings[rank]
        value = format.fixed(reading.value, 1, metric.digits).strip()
        text = f"{store.name(rank)}: {metric.title} {value} {metric.unit}".rstrip()
        text += f", {format.excess(reading.deviation)} against its peers"
        yield Anomaly(("outlier", metric.key, rank), Level.WARN, format.clean(text), "ranks", rank)


def _experts(store: Store) -> Iterator[Anomaly]:
    """Dead experts, then hot experts; if known, with the step at which each became dead or hot."""
    newest = shown(store, None)
    for one in unwell(store, newest)[:MOST] if newest else ():
        layer, expert = one.cell
        load = (
            f"is dead: {100 * one.load:.1f} %"
            if one.health is Health.DEAD
            else f"is hot: {one.load:.1f} times"
        )
        since = f", {since_text(one.streak)}" if one.streak else ""
        text = f"expert {expert} of layer {layer} {load} of its fair share{since}"
        yield Anomaly(("expert", layer, expert), Level.WARN, text, "experts", layer=layer, expert=expert)


def _slowest_step(store: Store) -> Iterator[Anomaly]:
    """The slowest of the newest steps that ran with the knob values in force, if it is much slower than their
    median."""
    revision = store.summary.revision if store.summary else 0
    steps = [one for one in store.state.summaries if one.revision == revision and math.isfinite(one.step_ms)]
    slowest = max(steps, key=lambda one: one.step_ms, default=None)
    usual = median(one.step_ms for one in steps)
    if slowest and usual and slowest.step_ms >= SLOW_STEP * usual:
        text = (
            f"step {format.grouped(slowest.step)} is the slowest of {len(steps)} with these knobs: "
            f"{format.duration_ms(slowest.step_ms).strip()}, {slowest.step_ms / usual:.1f} times the median"
        )
        yield Anomaly(("slowest", slowest.step), Level.WARN, text, "pipeline", step=slowest.step)
