"""Diagnosis: one sentence that judges the state of the run, with its evidence.

The hub's alerts (`agents.alerts`) cover stalls, stragglers, silent ranks, routing and loss; this module shows their
text. Its own thresholds cover only what has no alert: a hot expert, a pipeline bubble, and the share of exposed
traffic.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile

from agents.alerts.finding import by_severity
from agents.protocol import PAUSED, Step, Summary, TrialState
from cockpit.data import format
from cockpit.data.evidence import evidence
from cockpit.data.metrics import median
from cockpit.data.outcomes import ratio_text, trial_changes
from cockpit.data.store import LinkState, Store, Topic
from engine.planner.advice import bottleneck


class Level(Enum):
    """Severity of a statement; the value is its glyph."""

    GOOD = "✓"
    NOTE = "·"
    WARN = "!"
    BAD = "✗"


REFRESH_S = 0.5  # the diagnosis is computed this often even without updates, because ages grow
WAITS_NOTE, WAITS_WARN = 0.25, 0.5  # share of exposed traffic in a step
IMBALANCE = 2.5  # load of the most loaded expert over the mean of its layer
BUBBLE = 0.2  # idle share of the pipeline
LOST = {
    "stopped": "suspended",
    "alive": "silent",
    "ended": "lost",
    "unknown": "unreachable",
}  # adjective for a lost rank, by the state of its process


@dataclass(frozen=True)
class Diagnosis:
    """One sentence, with its evidence."""

    level: Level
    text: str
    rank: int | None = None  # the rank that the sentence names


Rule = Callable[[Store], Diagnosis | None]


def _cockpit_fault(store: Store) -> Diagnosis | None:
    """The source failed and no more updates arrive. This is a fault of the cockpit, not of the run."""
    if store.fault is None:
        return None
    text = f"an internal error detached this cockpit: {store.fault.error}"
    return Diagnosis(Level.BAD, format.clean(f"{text} · {store.fault.how_to_continue}"))


def _refused(store: Store) -> Diagnosis | None:
    reason = store.source_error or store.refused
    return Diagnosis(Level.BAD, format.clean(reason)) if reason else None


def _waiting(store: Store) -> Diagnosis | None:
    return Diagnosis(Level.NOTE, "waiting for the first rank to join") if not store.state.hellos else None


def _lost_ranks(store: Store) -> Diagnosis | None:
    lost = [gone for gone in store.state.gone.values() if not gone.clean]
    if not lost:
        return None
    first = lost[0]
    more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    why = f": {format.clean(first.text)}" if first.text else ""
    last = store.state.steps.get(first.rank)
    at = f" · last step {format.grouped(last.step)}" if last else ""
    return Diagnosis(Level.BAD, f"{store.name(first.rank)}{more} {LOST[first.process]}{why}{at}", first.rank)


def _failed(store: Store) -> Diagnosis | None:
    """The run failed; the launcher's event names the cause."""
    if store.link is not LinkState.FAILED:
        return None
    # The log may also hold causes of earlier failures. The cause of this failure is the one that the lost ranks report.
    reasons = {gone.text for gone in store.state.gone.values()}
    causes = [event for event in store.state.events if event.source == "run" and event.text in reasons]
    return Diagnosis(Level.BAD, format.clean(causes[-1].text)) if causes else None


def _ended(store: Store) -> Diagnosis | None:
    if store.link is not LinkState.ENDED:
        return None
    summary = store.summary
    loss = f" · loss {summary.loss:.3f}" if summary and summary.loss is not None else ""
    planned = store.steps_planned
    of = f" of {format.grouped(planned)}" if planned else ""
    done = None if store.step is None else store.step + 1  # steps are counted from 0
    level = Level.GOOD if planned is None or store.finished else Level.NOTE
    if summary and not_finite(summary):
        level = Level.BAD
    return Diagnosis(level, f"the run is over: {format.grouped(done)}{of} steps{loss}")


def _stale(store: Store) -> Diagnosis | None:
    if store.link is not LinkState.STALE:
        return None
    return Diagnosis(
        Level.WARN, "no message from the hub: this is the last state; it updates again when the hub is back"
    )


def not_finite(summary: Summary) -> bool:
    """Whether the loss of a step is NaN or infinite; a missing loss is neither."""
    return summary.loss is not None and not math.isfinite(summary.loss)


def _loss_not_finite(store: Store) -> Diagnosis | None:
    """Names the first step at which the loss was not finite; the hub's alert names only the newest."""
    if store.summary is None or not not_finite(store.summary):
        return None
    # `points` also covers steps before the newest summaries: a bucket keeps its first value that is not finite.
    *_, (step, loss) = takewhile(
        lambda point: not math.isfinite(point[1]), reversed(store.state.points("loss"))
    )
    return Diagnosis(
        Level.BAD, f"loss is {loss} since step {format.grouped(step)} · resume from an earlier checkpoint"
    )


# ---------------------------------------------------------------------------------------------- alerts

_ALERT_LEVEL = {"error": Level.BAD, "warning": Level.WARN}
_ADVICE = {"drops": "try a higher capacity_factor, or none"}  # by the name of the alert to which it is added


def _alert(level: str) -> Rule:
    """A rule that shows the most severe active alert of a level, with the hub's text."""

    def rule(store: Store) -> Diagnosis | None:
        alerts = [alert for alert in store.state.alerts.values() if alert.level == level]
        if not alerts:
            return None
        gravest = by_severity(alerts)[0]
        parts = [format.clean(gravest.text)]
        if gravest.name in _ADVICE:
            parts.append(_ADVICE[gravest.name])
        if len(alerts) > 1:
            parts.append(f"{len(alerts) - 1} more in the log")
        rank = gravest.ranks[0] if gravest.ranks else None
        return Diagnosis(_ALERT_LEVEL[level], " · ".join(parts), rank)

    return rule


def alerted(store: Store, name: str) -> bool:
    """Whether an alert of this name is active."""
    return any(alert.name == name for alert in store.state.alerts.values())


def alerted_ranks(store: Store, *names: str) -> set[int]:
    """Ranks that are listed in active alerts with one of these names."""
    return {rank for alert in store.state.alerts.values() if alert.name in names for rank in alert.ranks}


# -------------------------------------------------------------------------------------- beyond the alerts


def paused(store: Store) -> bool:
    """Whether an operator has paused all ranks."""
    doing = [store.state.pulses[rank].doing for rank in store.present if rank in store.state.pulses]
    return bool(doing) and all(one == PAUSED for one in doing)


def _paused(store: Store) -> Diagnosis | None:
    if not paused(store) or store.link is not LinkState.LIVE:
        return None
    at = f" after step {format.grouped(store.step)}" if store.step is not None else ""
    return Diagnosis(Level.WARN, f"paused{at}: the ranks wait for commands · set resume to continue")


def _hot_expert(store: Store) -> Diagnosis | None:
    """Names the most loaded expert. The hub alerts when the load of a layer collapses, but not on one hot expert."""
    experts = store.state.experts
    hot = [
        (max(layer.load) * len(layer.load) / sum(layer.load), layer)
        for layer in (experts.layers if experts else [])
        if sum(layer.load)
    ]
    if not hot:
        return None
    ratio, layer = max(hot, key=lambda pair: pair[0])
    if ratio < IMBALANCE:
        return None
    expert = layer.load.index(max(layer.load))
    return Diagnosis(Level.WARN, f"expert {expert} of layer {layer.layer} carries {ratio:.1f}× its share")


def _bubble_bound(store: Store) -> Diagnosis | None:
    summary = store.summary
    if store.oversubscribed or not summary or summary.bubble is None or summary.bubble < BUBBLE:
        return None
    text = f"bubble-bound: the stages idle {format.percent(summary.bubble).strip()} of the time"
    now = summary.knobs.get("micro_batches")
    if isinstance(now, int):
        text += f" with {now} micro-batches · {_more_micro_batches(store, now)}"
    return Diagnosis(Level.WARN, text)


def _more_micro_batches(store: Store, now: int) -> str:
    """Advice to use more than `now` micro-batches against a bubble, or the trial of this run that showed no gain."""
    refuted = [trial for trial in store.state.trials.values() if _refutes_more(trial, now)]
    if refuted:
        trial = refuted[-1]
        return f"a trial of {trial_changes(trial)} was not faster: step time {ratio_text(trial)}"
    board = store.state.board
    legal = next((k.legal for k in board.knobs if k.name == "micro_batches"), None) if board else None
    more = [one for one in legal.choices if isinstance(one, int) and one > now] if legal else []
    if legal and not more:
        return "no larger number is legal here"
    return f"cockpit try micro_batches={min(more)} measures whether more helps" if more else "try more"


def _refutes_more(trial: TrialState, now: int) -> bool:
    """Whether the trial changed only micro_batches, to more than `now`, and was reverted after measuring."""
    name, tried_with = "micro_batches", trial.changes.get("micro_batches")
    alone = set(trial.changes) == {name} and trial.before.get(name) == now
    more = isinstance(tried_with, int) and tried_with > now
    return alone and more and trial.state == "reverted" and trial.ratio is not None


def _time_shares(store: Store) -> Diagnosis | None:
    """The diagnosis without a problem: the longest phase of a step, and the share of exposed traffic."""
    step_ms = median(step.step_ms for step in store.state.steps.values())
    if not step_ms:
        return Diagnosis(
            Level.NOTE, f"{len(store.present)}/{store.world} ranks have joined; no step is done yet"
        )
    names = dict.fromkeys(name for step in store.state.steps.values() for name in step.phases)
    phase_ms = {name: median(_phase_values(store, name)) or 0.0 for name in names}
    # In a loop that uses `agents.join`, the vote takes place after the reported step, so `step_ms` excludes it.
    whole_ms = max(step_ms, sum(phase_ms.values()))
    shares = {name: ms / whole_ms for name, ms in phase_ms.items()}
    phase = max(shares, key=lambda name: shares[name], default=None)
    waits = min(1.0, (median(step.waited_ms for step in store.state.steps.values()) or 0.0) / step_ms)
    parts = [f"{phase} takes {shares[phase]:.0%} of a step"] if phase else []
    parts.append(f"exposed traffic {waits:.0%}")
    level = Level.GOOD if waits < WAITS_NOTE else Level.NOTE
    if waits >= WAITS_WARN and not store.oversubscribed:  # with shared cores, ranks wait for the cores
        level = Level.WARN
        if found := evidence(store):
            parts = [bottleneck(found).sentence, "cockpit advise ranks changes"]
    return Diagnosis(level, " · ".join(parts))


def _phase_values(store: Store, name: str) -> Iterator[float]:
    records: Iterator[Step] = iter(store.state.steps.values())
    return (step.phases[name] for step in records if name in step.phases)


RULES: tuple[Rule, ...] = (
    _cockpit_fault,
    _failed,
    _refused,
    _waiting,
    _lost_ranks,
    _ended,
    _stale,
    _alert("error"),
    _loss_not_finite,
    _paused,
    _alert("warning"),
    _hot_expert,
    _bubble_bound,
    _time_shares,
)


def diagnosis(store: Store) -> Diagnosis:
    """The first rule that applies, in order of importance. It is computed once for all panels."""
    moment = (store.link, store.refused, store.source_error, int(store.clock() / REFRESH_S))
    return store.once("diagnosis", tuple(Topic), lambda: _diagnosis(store), moment)


def _diagnosis(store: Store) -> Diagnosis:
    found = next(statement for rule in RULES if (statement := rule(store)))
    shown = store.link in (LinkState.LIVE, LinkState.PLAYBACK)
    if found.level is Level.BAD or not shown or not store.oversubscribed:
        return found
    # Shared cores come first, because they distort every measured time.
    cores = store.number("cores")
    caveat = (
        f"{store.world} ranks share {cores or 'too few'} cores: bubbles and times are not those of a cluster"
    )
    finding = f" · {found.text}" if found.level is Level.WARN else ""
    return Diagnosis(Level.WARN, caveat + finding, found.rank)
