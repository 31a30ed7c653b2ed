"""Diagnoses from the hub's alerts: the most severe alert, its cause, when it began, and the best next step.

One fault often raises several alerts. For example, a throttled node also has slow ranks and slows down the run. The
diagnosis names the alert that explains the others.
"""

from collections.abc import Callable, Sequence

from agents.alerts.finding import by_severity
from agents.protocol import STACKS_FACT, Alert, Summary
from cockpit.data import format
from cockpit.data.diagnosis.bottlenecks import ADVICE as BOTTLENECK_ADVICE
from cockpit.data.diagnosis.statement import Diagnosis, Level
from cockpit.data.metrics import median
from cockpit.data.store import Store
from engine.planner.advice import EXCHANGES

ALERT_LEVEL = {"error": Level.BAD, "warning": Level.WARN}
ADVICE = {
    "drops": "try a higher capacity_factor, or none",
    "straggler": "check its device and other jobs on its node: 2 Ranks",
    "throttle": "check the cooling and the power limit",
    "slowdown": "see what changed then: 8 Log",
    "memory": "7 Plan shows what recompute or more micro-batches save",
    "collapse": "use stronger balancing or resume a checkpoint: 4 Experts",
    "dead_experts": "4 Experts shows which ones, and since when",
    "loss_spike": "see what changed before it: 6 Curves",
    "gradient_spike": "see what changed before it: 6 Curves",
}
"""The next step by the name of an alert."""
SLOW = ("straggler", "slowdown")  # alerts that throttled devices can explain
BEFORE = 32  # number of steps before a slowdown that are compared with the steps after it
AFTER = 5
EXPLAINS = 0.5  # minimum share of a step's growth at which collectives are named as its cause


def alert_rule(level: str) -> Callable[[Store], Diagnosis | None]:
    """Create a rule that diagnoses the root cause of the active alerts with severity `level`."""

    def rule(store: Store) -> Diagnosis | None:
        alerts = by_severity(alert for alert in store.state.alerts.values() if alert.level == level)
        return _diagnosis(store, alerts) if alerts else None

    return rule


def _diagnosis(store: Store, alerts: Sequence[Alert]) -> Diagnosis:
    found = root_cause(alerts)
    since = found.since_step
    rank = found.ranks[0] if found.ranks else None
    text, cause, advice = format.clean(found.text), found.name, ADVICE.get(found.name, "")
    if found.name == "slowdown" and since is not None and (axis := grown_axis(store, since)):
        text, cause, advice = _grown_text(store, axis, since), axis, BOTTLENECK_ADVICE[axis]
    if found.name == "nan" and found.text.startswith("gradient norm"):
        cause = "gradient_nan"  # the loss is finite
    if found.name == "stall":
        since = None  # the text names the step at which the run is stuck
        if explained := _stack_explanation(store, found):
            text = f"{text.split(';')[0]}: {explained}"
            advice = "cockpit stacks shows the stacks"
        else:
            advice = _stack_advice(store, rank) if rank is not None else ""
    if len(alerts) > 1:
        text += f" · {len(alerts) - 1} more in the log"
    return Diagnosis(ALERT_LEVEL[found.level], text, rank, cause, since, advice)


def root_cause(alerts: Sequence[Alert]) -> Alert:
    """The alert that explains the most severe alert; `alerts` are ordered by severity."""
    first = alerts[0]
    throttled = [alert for alert in alerts if alert.name == "throttle"]
    if first.name in SLOW and throttled and set(first.ranks) <= {r for one in throttled for r in one.ranks}:
        return throttled[0]
    return first


def grown_axis(store: Store, since: int) -> str | None:
    """The axis whose exposed collectives explain most of a slowdown; None if computation explains it."""
    before, after = _around(store, since)
    if not before or not after:
        return None
    grown_ms = _median_ms(after) - _median_ms(before)
    # A slow rank makes all others wait, so only the rank that waits least shows how long the collectives take.
    least_ms = min((step.waited_ms for step in store.state.steps.values()), default=0.0)
    waited_ms = median(sum(one.exposed_ms for one in summary.comm.values()) for summary in before) or 0.0
    if grown_ms <= 0 or least_ms - waited_ms < EXPLAINS * grown_ms:
        return None
    by_axis = {axis: exposed_ms(after, axis) - exposed_ms(before, axis) for axis in EXCHANGES}
    return max(by_axis, key=lambda name: by_axis[name])


def _around(store: Store, since: int) -> tuple[list[Summary], list[Summary]]:
    """The last summaries before a slowdown, and the newest summaries. `since`: the step at which the slowdown began."""
    summaries = store.state.summaries
    return [one for one in summaries if one.step < since][-BEFORE:], summaries[-AFTER:]


def _median_ms(summaries: Sequence[Summary]) -> float:
    return median(one.step_ms for one in summaries) or 0.0


def exposed_ms(summaries: Sequence[Summary], axis: str) -> float:
    """Median exposed milliseconds per step in the collectives of an axis; 0 if there are none."""
    return median(one.comm[axis].exposed_ms for one in summaries if axis in one.comm) or 0.0


def _grown_text(store: Store, axis: str, since: int) -> str:
    before, after = _around(store, since)
    return (
        f"{EXCHANGES[axis]} slow down the run: {format.grouped(exposed_ms(after, axis))} ms a step instead of "
        f"{format.grouped(exposed_ms(before, axis))}, step {format.grouped(_median_ms(after))} ms instead of "
        f"{format.grouped(_median_ms(before))}"
    )


def _stack_explanation(store: Store, stall: Alert) -> str:
    """The hub's sentence about the stacks of a stalled run, starting with the outlier ranks and their lines of code; ""
    if the hub has not published it, or if no rank differs from the others.
    """
    began_s = stall.time_s if stall.since_s is None else stall.since_s
    newest = next((event for event in reversed(store.state.events) if STACKS_FACT in event.facts), None)
    found = newest is not None and newest.time_s >= began_s and newest.facts.get("odd")
    if newest is None or not found:
        return ""
    others, *odd = format.clean(newest.text).split("; ")
    return "; ".join([*odd, others])


def _stack_advice(store: Store, rank: int) -> str:
    """The command that prints the stack of a rank, and the host on which to run it; "" if the rank is unknown."""
    hello = store.state.hellos.get(rank)
    return f"on {format.clean(hello.host)}: py-spy dump --pid {hello.pid}" if hello else ""
