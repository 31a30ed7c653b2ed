"""Diagnosis: one sentence that judges the state of the run, with its evidence.

The hub's alerts (`agents.alerts`) cover stalls, stragglers, silent ranks, routing and loss; `alert_causes` turns them
into diagnoses. The module `bottlenecks` diagnoses conditions without an alert, such as a pipeline bubble.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile

from agents.protocol import PAUSED, Summary
from cockpit.data import format
from cockpit.data.diagnosis.alert_causes import alert_rule
from cockpit.data.diagnosis.bottlenecks import (
    bubble_bound,
    data_bound,
    exchange_bound,
    hot_expert,
    time_shares,
)
from cockpit.data.diagnosis.statement import Diagnosis as Diagnosis
from cockpit.data.diagnosis.statement import Level as Level
from cockpit.data.link import RECORDING, LinkState
from cockpit.data.store import Store, Topic

REFRESH_S = 0.5  # interval at which the diagnosis is computed even without updates, because ages grow
# adjective for a lost rank, by the state of its process
LOST = {
    "stopped": "suspended",
    "alive": "silent",
    "ended": "lost",
    "unknown": "unreachable",
    "restarting": "starting again",
}


Rule = Callable[[Store], Diagnosis | None]


def _cockpit_fault(store: Store) -> Diagnosis | None:
    """Reports that the thread from which the cockpit gets its updates has failed, so that no more updates arrive. This
    is a fault of the cockpit, not of the run."""
    if store.fault is None:
        return None
    text = f"an internal error detached this cockpit: {store.fault.error}"
    return Diagnosis(Level.BAD, format.clean(f"{text} · {store.fault.how_to_continue}"))


def _refused(store: Store) -> Diagnosis | None:
    reason = store.source_error or store.refused
    return Diagnosis(Level.BAD, format.clean(reason)) if reason else None


def _waiting(store: Store) -> Diagnosis | None:
    if store.state.hellos:
        return None
    if store.loading:
        arrived, parts = store.loading
        text = f"the state of the run is loading: {arrived} of {format.counted(parts, 'part')} received"
    elif store.playback_position:
        if any(event.source == RECORDING for event in store.state.events):
            text = "the recording is damaged: it has no state of the ranks at this time"
            return Diagnosis(Level.WARN, text, advice="8 Log says what could not be read")
        text = "no rank had joined at this time"
    elif store.unanswered:
        text = "waiting for the run's hub to answer"
    else:
        text = "waiting for the first rank to join"
    return Diagnosis(Level.NOTE, text)


def _lost_ranks(store: Store) -> Diagnosis | None:
    lost = [gone for gone in store.state.gone.values() if not gone.clean]
    if not lost:
        return None
    if all(gone.process == "restarting" for gone in lost):
        ranks = f"{len(lost)} of {format.counted(store.world, 'rank')} have left"
        return Diagnosis(
            Level.WARN, f"the ranks are restarting: {ranks}, after a checkpoint", cause="restarting"
        )
    first = lost[0]
    more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    why = f": {format.clean(first.text)}" if first.text else ""
    last = store.state.steps.get(first.rank)
    text = f"{store.name(first.rank)}{more} {LOST[first.process]}{why}"
    return Diagnosis(Level.BAD, text, first.rank, LOST[first.process], last.step if last else None)


def _failed(store: Store) -> Diagnosis | None:
    """Reports that the run has failed, with the cause from the launcher's event."""
    if store.link is not LinkState.FAILED:
        return None
    # The log may also hold causes of earlier failures. The cause of this failure is the one that the lost ranks report.
    reasons = {gone.text for gone in store.state.gone.values()}
    causes = [event for event in store.state.events if event.source == "run" and event.text in reasons]
    return Diagnosis(Level.BAD, format.clean(causes[-1].text), cause="failed") if causes else None


def _ended(store: Store) -> Diagnosis | None:
    if store.link is not LinkState.ENDED:
        return None
    summary = store.summary
    loss = f" · loss {summary.loss:.3f}" if summary and summary.loss is not None else ""
    planned = store.steps_planned
    of = f" of {format.grouped(planned)}" if planned else ""
    done = store.steps_done
    level = Level.GOOD if planned is None or store.finished else Level.NOTE
    norm = ""
    if summary and not_finite(summary):
        level = Level.BAD
    elif summary and _gradient_not_finite(summary):
        level, norm = Level.BAD, f" · gradient norm {summary.grad_norm}"
    return Diagnosis(level, f"the run is over: {format.grouped(done)}{of} steps{loss}{norm}")


def _stale(store: Store) -> Diagnosis | None:
    if store.link is not LinkState.STALE:
        return None
    return Diagnosis(
        Level.WARN, "no message from the hub: this is the last state; it updates again when the hub is back"
    )


def not_finite(summary: Summary) -> bool:
    """Whether the loss of a step is NaN or infinite; a missing loss is neither."""
    return summary.loss is not None and not math.isfinite(summary.loss)


def _gradient_not_finite(summary: Summary) -> bool:
    """Whether the gradient norm of a step is NaN or infinite. With fp16 that is normal: the scaler skips the update."""
    norm, scaled = summary.grad_norm, summary.skipped and summary.loss_scale is not None
    return norm is not None and not math.isfinite(norm) and not scaled


def _loss_not_finite(store: Store) -> Diagnosis | None:
    """Names the first step at which the loss was not finite; the hub's alert names only the newest such step."""
    if store.summary is None or not not_finite(store.summary):
        return None
    # `points` also covers steps before the newest summaries: a bucket keeps its first value that is not finite.
    *_, (step, loss) = takewhile(
        lambda point: not math.isfinite(point[1]), reversed(store.state.points("loss"))
    )
    advice = "resume from an earlier checkpoint"
    return Diagnosis(Level.BAD, f"loss is {loss}", cause="nan", since=step, advice=advice)


# ---------------------------------------------------------------------------------------------- alerts


def alerted(store: Store, name: str) -> bool:
    """Whether an alert of this name is active."""
    return any(alert.name == name for alert in store.state.alerts.values())


def alerted_ranks(store: Store, *names: str) -> set[int]:
    """Ranks that are listed in active alerts with one of these names."""
    return {rank for alert in store.state.alerts.values() if alert.name in names for rank in alert.ranks}


# -------------------------------------------------------------------------------------- beyond the alerts


def paused(store: Store) -> bool:
    """Whether an operator has paused all ranks."""
    pulses = store.state.pulses
    found = False
    for rank in store.present:
        if rank in pulses:
            # In a run that is not paused, the loop usually ends at the first rank.
            if pulses[rank].doing != PAUSED:
                return False
            found = True
    return found


def _paused(store: Store) -> Diagnosis | None:
    if not paused(store) or store.link is not LinkState.LIVE:
        return None
    at = f" after step {format.grouped(store.step)}" if store.step is not None else ""
    return Diagnosis(Level.WARN, f"paused{at}: the ranks wait for commands · set resume to continue")


RULES: tuple[Rule, ...] = (
    _cockpit_fault,
    _failed,
    _refused,
    _waiting,
    _lost_ranks,
    _ended,
    _stale,
    alert_rule("error"),
    _loss_not_finite,
    _paused,
    alert_rule("warning"),
    hot_expert,
    exchange_bound,
    data_bound,
    bubble_bound,
    time_shares,
)


def diagnosis(store: Store) -> Diagnosis:
    """The diagnosis of the run: that of the most important rule that applies. The result is cached, because several
    panels use it."""
    moment = (store.link, store.refused, store.source_error, int(store.clock() / REFRESH_S))
    return store.once("diagnosis", tuple(Topic), lambda: _diagnosis(store), moment)


def _diagnosis(store: Store) -> Diagnosis:
    found = next(statement for rule in RULES if (statement := rule(store)))
    shown = store.link in (LinkState.LIVE, LinkState.PLAYBACK)
    if found.level is Level.BAD or not shown or not store.oversubscribed or store.step is None:
        return found
    # Shared cores come first, because they distort every measured time.
    cores = store.number("cores")
    caveat = (
        f"{store.world} ranks share {cores or 'too few'} cores: bubbles and times are not those of a cluster"
    )
    if found.level is not Level.WARN:
        return Diagnosis(Level.WARN, caveat)
    return replace(found, text=f"{store.world} ranks share {cores or 'too few'} cores · {found.text}")
