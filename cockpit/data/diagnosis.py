"""The two lines that are always there: how the run is, and the one sentence that says what to think of it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile

from agents.alerts.finding import by_severity
from agents.protocol import PAUSED, Step, Summary
from cockpit.data import format
from cockpit.data.advice import more_micro_batches
from cockpit.data.metrics import OWN_TIME, judged, read
from cockpit.data.outcomes import how_far, tried
from cockpit.data.store import LinkState, Store, Topic, median


class Level(Enum):
    """How much something matters; the value is its glyph."""

    GOOD = "✓"
    NOTE = "·"
    WARN = "!"
    BAD = "✗"


STALL_FLOOR_S = 5.0  # and five typical steps, whichever is longer
AGAIN_S = 0.5  # some rules go by the clock: so often the diagnosis is made anew, though nothing has come
SILENT_S = 4.0  # a pulse comes each second
SLOW_RANK = 0.25  # more time of its own than its peers;
SLOW_SHARED = 0.5  # where ranks share cores, and are slow by turns
WAITS, WAITS_MOST = 0.25, 0.5  # of a step: worth a word, and a warning
DROP_SHARE = 0.01
IMBALANCE = 2.5
LOST = {
    "stopped": "suspended",
    "alive": "silent",
    "ended": "lost",
    "unknown": "not heard",
}  # by what its process is


@dataclass(frozen=True)
class Item:
    """One field of the verdict line; in a narrow terminal the highest `rank` goes first."""

    text: str
    rank: int
    level: Level | None = None


_LINK_LEVEL = {
    LinkState.WAITING: Level.NOTE,
    LinkState.LIVE: Level.GOOD,
    LinkState.PLAYBACK: Level.NOTE,
    LinkState.STALE: Level.WARN,
    LinkState.ENDED: Level.GOOD,
    LinkState.FAILED: Level.BAD,
}


def headline(store: Store, frozen: bool = False) -> tuple[str, Level]:
    """``LIVE``, ``STALE 12 s`` ..."""
    link = store.link
    if store.fault:
        return "DETACHED", Level.BAD
    if store.playing:
        return LinkState.PLAYBACK.value, Level.NOTE
    age = store.age_s
    if link is LinkState.STALE:
        return f"STALE {format.age(age)}" if age is not None else "STALE", Level.WARN
    if link is LinkState.LIVE and paused(store):
        return "PAUSED", Level.WARN
    if link is LinkState.LIVE and (stalled(store) or len(store.unlost) < len(store.state.hellos)):
        return "STALLED", Level.BAD
    if frozen:
        return "FROZEN", Level.WARN
    return link.value, _LINK_LEVEL[link]


def verdict(store: Store, operator: bool) -> Iterator[Item]:
    """The fields of line one, in the order they are shown."""
    summary = store.summary
    yield Item(store.run, 1)
    # How many are done: steps are counted from 0, and the newest step's own number is in the panels.
    done, planned = None if store.step is None else store.step + 1, store.steps_planned
    goal = f"/{format.grouped(planned)}" if planned else ""
    yield Item(f"{format.grouped(done).rjust(len(goal) - 1)}{goal} steps", 0)
    if summary:
        yield Item(f"{format.duration_ms(summary.step_ms)}/step", 2)
        if summary.tokens_per_s is not None:
            yield Item(f"{format.si(summary.tokens_per_s):>6} tok/s", 6)
        if summary.mfu is not None:
            yield Item(f"{format.percent(summary.mfu)} MFU", 5)
        if summary.loss is not None:
            yield Item(f"loss {summary.loss:.3f}", 3, Level.BAD if _broken(summary) else None)
        if store.trial:
            yield Item(f"trial {tried(store.trial)} ({how_far(store.trial)})", 4, Level.WARN)
        if summary.bubble is not None:
            bound = f" (bound {format.percent(summary.bubble_bound).strip()})" if summary.bubble_bound else ""
            yield Item(f"bubble {format.percent(summary.bubble)}{bound}", 8)
    if store.link is not LinkState.ENDED:
        whole = len(store.reporting) == store.world
        yield Item(f"{store.coverage()} ranks", 4, None if whole else Level.WARN)
    if not store.playing:
        yield Item("OPERATOR" if operator else "VIEWER", 7)
    if store.link is LinkState.LIVE and store.age_s is not None:
        yield Item(f"{format.age(store.age_s)} old", 9)


@dataclass(frozen=True)
class Diagnosis:
    """One sentence, with its evidence."""

    level: Level
    text: str
    rank: int | None = None  # the rank it points at


Rule = Callable[[Store], Diagnosis | None]


def _detached(store: Store) -> Diagnosis | None:
    """The feed has failed and nothing comes any more: a fault of the cockpit's, and none of the run's."""
    if store.fault is None:
        return None
    what = f"this cockpit is detached by a fault of its own: {store.fault.error}"
    return Diagnosis(Level.BAD, format.clean(f"{what} · {store.fault.go_on}"))


def _refused(store: Store) -> Diagnosis | None:
    said = store.trouble or store.refused
    return Diagnosis(Level.BAD, format.clean(said)) if said else None


def _waiting(store: Store) -> Diagnosis | None:
    return Diagnosis(Level.NOTE, "waiting for the first rank to report") if not store.state.hellos else None


def _lost(store: Store) -> Diagnosis | None:
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
    """The run is over and did not end well: its launcher's own sentence names the cause."""
    if store.link is not LinkState.FAILED:
        return None
    # The log may hold causes of earlier attempts too; this end's is what its ranks are said to have gone of.
    ends = {gone.text for gone in store.state.gone.values()}
    said = [event for event in store.state.events if event.source == "run" and event.text in ends]
    return Diagnosis(Level.BAD, format.clean(said[-1].text)) if said else None


def _ended(store: Store) -> Diagnosis | None:
    if store.link is not LinkState.ENDED:
        return None
    summary = store.summary
    loss = f" · loss {summary.loss:.3f}" if summary and summary.loss is not None else ""
    planned = store.steps_planned
    of = f" of {format.grouped(planned)}" if planned else ""
    done = None if store.step is None else store.step + 1  # steps are counted from 0
    level = Level.GOOD if planned is None or store.finished else Level.NOTE
    if summary and _broken(summary):
        level = Level.BAD
    return Diagnosis(level, f"the run is over: {format.grouped(done)}{of} steps{loss}")


def _stale(store: Store) -> Diagnosis | None:
    if store.link is not LinkState.STALE:
        return None
    return Diagnosis(
        Level.WARN,
        "the hub is not heard: this is the last picture; it resumes by itself when the hub is back",
    )


def _broken(summary: Summary) -> bool:
    return summary.loss is not None and not math.isfinite(summary.loss)


def _broken_loss(store: Store) -> Diagnosis | None:
    if store.summary is None or not _broken(store.summary):
        return None
    # Also where that began before the newest summaries: a bucket keeps its first value that is no number.
    *_, (step, loss) = takewhile(
        lambda point: not math.isfinite(point[1]), reversed(store.state.points("loss"))
    )
    return Diagnosis(
        Level.BAD, f"loss is {loss} since step {format.grouped(step)} · resume from an earlier checkpoint"
    )


def _alerted(level: str) -> Rule:
    """What the hub holds to be so, the gravest first; a loss, a stall, a collapse are its to find."""

    def rule(store: Store) -> Diagnosis | None:
        alerts = [alert for alert in store.state.alerts.values() if alert.level == level]
        if not alerts:
            return None
        gravest = by_severity(alerts)[0]
        more = f" · {len(alerts) - 1} more in the log" if len(alerts) > 1 else ""
        rank = gravest.ranks[0] if gravest.ranks else None
        return Diagnosis(_ALERT_LEVEL[level], format.clean(gravest.text) + more, rank)

    return rule


_ALERT_LEVEL = {"error": Level.BAD, "warning": Level.WARN}


def _silent(store: Store) -> Diagnosis | None:
    """A rank whose own pulse thread has stopped: suspended, or its machine is gone."""
    now = store.clock()
    ages = {rank: now - store.pulse_seen[rank] for rank in store.here if rank in store.pulse_seen}
    if not ages:
        return None
    rank = max(ages, key=lambda rank: ages[rank])
    # Measured against the last word from anyone: a whole silent stream is a stale picture, not a silent rank.
    if ages[rank] - min(ages.values()) < SILENT_S:
        return None
    silent = sum(age - min(ages.values()) >= SILENT_S for age in ages.values())
    more = f" and {silent - 1} more" if silent > 1 else ""
    return Diagnosis(
        Level.BAD,
        f"{store.name(rank)}{more} silent for {format.age(ages[rank])}: suspended, or cut off",
        rank,
    )


def paused(store: Store) -> bool:
    """Whether the ranks hold still at an operator's word."""
    doing = [store.state.pulses[rank].doing for rank in store.here if rank in store.state.pulses]
    return bool(doing) and all(one == PAUSED for one in doing)


def _paused(store: Store) -> Diagnosis | None:
    if not paused(store) or store.link is not LinkState.LIVE:
        return None
    at = f" after step {format.grouped(store.step)}" if store.step is not None else ""
    return Diagnosis(Level.WARN, f"paused{at}: the run holds still and hears commands · set resume to go on")


def stalled(store: Store) -> list[int]:
    """Ranks that have been in one operation for far longer than a step, the one longest in it first."""
    usual = store.summary.step_ms if store.summary else 0.0
    limit = max(1000 * STALL_FLOOR_S, 5 * usual)
    stuck = [
        p for rank, p in store.state.pulses.items() if p.since_ms > limit and rank not in store.state.gone
    ]
    return [pulse.rank for pulse in sorted(stuck, key=lambda pulse: (pulse.step, -pulse.since_ms))]


def _stalled(store: Store) -> Diagnosis | None:
    stuck = stalled(store)
    if not stuck or store.step is None:
        return None
    pulse = store.state.pulses[stuck[0]]
    doing = "".join(format.doing(pulse.doing))
    others = f" · {len(stuck)} ranks wait" if len(stuck) > 1 else ""
    return Diagnosis(
        Level.BAD,
        f"stalled: {store.name(pulse.rank)} {doing} for {format.age(pulse.since_ms / 1000)}{others}",
        pulse.rank,
    )


def _dropping(store: Store) -> Diagnosis | None:
    experts = store.state.experts
    if not experts:
        return None
    worst = max(experts.layers, key=lambda layer: drop_share(layer.load, layer.dropped), default=None)
    if worst is None or (share := drop_share(worst.load, worst.dropped)) < DROP_SHARE:
        return None
    return Diagnosis(
        Level.WARN,
        f"layer {worst.layer} drops {format.percent(share).strip()} of its tokens at this capacity · "
        "try a higher capacity_factor, or none",
    )


def drop_share(load: list[int], dropped: int) -> float:
    """Dropped (token, expert) pairs over all that were routed."""
    return dropped / sum(load) if sum(load) else 0.0


def _imbalanced(store: Store) -> Diagnosis | None:
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


def slow_from(store: Store) -> float:
    """How far a rank is from its peers when it is slow."""
    return SLOW_SHARED if store.oversubscribed else SLOW_RANK


def _slow_rank(store: Store) -> Diagnosis | None:
    metric = judged(store)
    apart = {rank: reading.apart for rank, reading in read(store, metric).items()}
    rank = max(apart, key=lambda rank: apart[rank], default=None)
    if rank is None or apart[rank] < slow_from(store):
        return None
    own = store.typical(rank, metric.get)
    whose = "of its own a step" if metric is OWN_TIME else "a step"
    slow = f"{store.name(rank)} is slow: {format.duration_ms(own).strip()} {whose}"
    return Diagnosis(Level.WARN, f"{slow}, {apart[rank]:+.0%} against its stage", rank)


def _bubble_bound(store: Store) -> Diagnosis | None:
    summary = store.summary
    if store.oversubscribed or not summary or summary.bubble is None or summary.bubble < 0.2:
        return None
    text = f"bubble-bound: the stages idle {format.percent(summary.bubble).strip()} of the time"
    now = summary.knobs.get("micro_batches")
    if isinstance(now, int):
        text += f" with {now} micro-batches · {more_micro_batches(store, now)}"
    return Diagnosis(Level.WARN, text)


def _dominant(store: Store) -> Diagnosis | None:
    """Nothing is wrong: say where the time goes."""
    step_ms = median(step.step_ms for step in store.state.steps.values())
    if not step_ms:
        return Diagnosis(Level.NOTE, f"{len(store.here)}/{store.world} ranks are here; no step is done yet")
    names = dict.fromkeys(name for step in store.state.steps.values() for name in step.phases)
    phase_ms = {name: median(_phase_values(store, name)) or 0.0 for name in names}
    whole_ms = max(step_ms, sum(phase_ms.values()))  # a loop of one's own agrees after what it calls its step
    shares = {name: ms / whole_ms for name, ms in phase_ms.items()}
    phase = max(shares, key=lambda name: shares[name], default=None)
    waits = min(1.0, (median(step.waited_ms for step in store.state.steps.values()) or 0.0) / step_ms)
    parts = [f"{phase} takes {shares[phase]:.0%} of a step"] if phase else []
    parts.append(f"exposed traffic {waits:.0%}")
    level = Level.GOOD if waits < WAITS else Level.NOTE
    if waits >= WAITS_MOST and not store.oversubscribed:  # there it is the cores that ranks wait for
        level = Level.WARN
    return Diagnosis(level, " · ".join(parts))


def _phase_values(store: Store, name: str) -> Iterator[float]:
    records: Iterator[Step] = iter(store.state.steps.values())
    return (step.phases[name] for step in records if name in step.phases)


RULES: tuple[Rule, ...] = (
    _detached,
    _failed,
    _refused,
    _waiting,
    _lost,
    _ended,
    _stale,
    _alerted("error"),
    _broken_loss,
    _silent,
    _paused,
    _stalled,
    _alerted("warning"),
    _dropping,
    _imbalanced,
    _slow_rank,
    _bubble_bound,
    _dominant,
)


def diagnosis(store: Store) -> Diagnosis:
    """The most important thing there is to say; shared cores come first: they make every time a guess."""
    moment = (store.link, store.refused, store.trouble, int(store.clock() / AGAIN_S))
    return store.once("diagnosis", tuple(Topic), lambda: _diagnosis(store), moment)


def _diagnosis(store: Store) -> Diagnosis:
    found = next(said for rule in RULES if (said := rule(store)))
    shown = store.link in (LinkState.LIVE, LinkState.PLAYBACK)
    if found.level is Level.BAD or not shown or not store.oversubscribed:
        return found
    cores = store.number("cores")
    caveat = (
        f"{store.world} ranks share {cores or 'too few'} cores: bubbles and times are not those of a cluster"
    )
    finding = f" · {found.text}" if found.level is Level.WARN else ""
    return Diagnosis(Level.WARN, caveat + finding, found.rank)
