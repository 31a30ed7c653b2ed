"""The metrics of one rank, each with the median of the rank's peers, and the reasons why the rank is slow."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agents.alerts.finding import by_severity
from agents.protocol import Alert, Vitals
from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import LOST, alerted_ranks
from cockpit.data.diagnosis.statement import Level
from cockpit.data.history.metric_table import CLOCK, PHASE, TOKENS, WAITING
from cockpit.data.history.ranks import Gather
from cockpit.data.metrics import (
    OWN_TIME,
    RECENT_STEPS,
    STEP_TIME,
    Metric,
    available,
    medians,
    outlier_distance,
    peers,
    read,
    settled_step,
)
from cockpit.data.ranks.rank_levels import levels_of
from cockpit.data.store import Store, Topic

NOTABLE = 0.05  # deviation, or share of a step, below which a difference is not named as a cause
SLOW = 0.10  # excess of own time from which a sentence calls a rank slower than its peers
FULL = 0.95  # from this share on, the memory or the power limit counts as fully used
OF_NODE = 0.5  # share of slow ranks from which the whole node is called slow


@dataclass(frozen=True)
class Fact:
    """The value of a metric on one rank, and the median over the rank's peers (None if no peer has a value)."""

    metric: Metric
    value: float
    peers: float | None

    @property
    def deviation(self) -> float | None:
        """The relative deviation from the median of the peers (0.1: 10 % above)."""
        return self.value / self.peers - 1 if self.peers else None

    @property
    def excess(self) -> float:
        return 0.0 if self.peers is None else self.value - self.peers


@dataclass(frozen=True)
class Why:
    """The diagnosis of one rank in one sentence, whose parts are ordered by importance."""

    level: Level
    parts: Sequence[str]

    @property
    def sentence(self) -> str:
        return " · ".join(self.parts)


def facts(store: Store, rank: int, at: int | None = None) -> dict[str, Fact]:
    """The known metrics of a rank, by metric key: the values at step `at` or, if `at` is None, over the newest steps
    (for times, the medians of these steps)."""
    return store.once(
        "facts",
        (Topic.GRID, Topic.RANKS, Topic.CURVES),
        lambda: {fact.metric.key: fact for fact in _facts(store, rank, at)},
        (rank, at),
    )


def _facts(store: Store, rank: int, at: int | None) -> Iterator[Fact]:
    group, gather = _peer_group(store, rank)
    if rank not in group:
        return
    here = group.index(rank)
    lost = {one for one, gone in store.state.gone.items() if not gone.clean}
    present = [place for place, one in enumerate(group) if one not in lost or place == here]
    for metric in available(store):
        values = _values(store, metric, group, gather, at)
        value = values[here] if values else math.nan
        if value == value:
            known = values if len(present) == len(group) else [values[place] for place in present]
            yield Fact(metric, value, _baseline(sorted(one for one in known if one == one), value))


def _peer_group(store: Store, rank: int) -> tuple[list[int], Gather]:
    """The ranks of the same pipeline stage as `rank`, including `rank`, and a `Gather` that picks the values of these
    ranks from a column of the history."""
    places = store.rank_history.places

    def compute() -> tuple[list[int], Gather]:
        keys = peers(store)
        group = [other for other, key in keys.items() if rank in keys and key == keys[rank]]
        return group, Gather([places.get(one, len(places)) for one in group])

    return store.once("peer group", (Topic.GRID,), compute, (rank, len(places)))


def _values(
    store: Store, metric: Metric, group: list[int], gather: Gather, at: int | None
) -> Sequence[float]:
    history = store.rank_history
    if at is not None:
        return gather(history.column(metric.key, at))
    if metric.vital:
        signs = (store.state.vitals.get(one) for one in group)
        found = (metric.vital(one) if one else None for one in signs)
        return [math.nan if value is None else value for value in found]
    # Times vary from step to step, so the median of several steps is used; for other metrics, the newest step is
    # enough.
    count = RECENT_STEPS if metric.unit == STEP_TIME.unit else 1
    return medians([gather(column) for column in history.newest(metric.key, count, settled_step(store))])


def _baseline(known: list[float], value: float) -> float | None:
    """The median of the peers' values; in a group of two ranks, the value of the other rank. `known`: the sorted values
    of all ranks of the group, including `value`, that of the rank itself.
    """
    if len(known) < 2:
        return None
    return known[len(known) // 2] if len(known) > 2 else known[0] + known[1] - value


def alerts_of(store: Store, rank: int) -> list[Alert]:
    """The active alerts that name a rank, most severe first."""
    return by_severity(alert for alert in store.state.alerts.values() if rank in alert.ranks)


# ------------------------------------------------------------------------------------------------ why


def no_record(store: Store, what: str = "step record") -> str:
    """Why there is no record of a rank: the rank has not sent one yet, this client gets no per-rank records (low
    bandwidth), or the recording kept none for this time."""
    if store.playback_position and store.playback_position.thinned:
        return "the recording keeps no records of single ranks of this time"
    return f"no {what} yet" if store.rank_records else "low bandwidth: no records of single ranks"


def why(store: Store, rank: int, at: int | None = None) -> Why:
    """Whether a rank is slower than its peers, and how it differs from them."""
    gone = store.state.gone.get(rank)
    if gone and not gone.clean:
        return Why(Level.BAD, [LOST[gone.process], *([format.clean(gone.text)] if gone.text else [])])
    known = facts(store, rank, at)
    main = known.get(OWN_TIME.key) or known.get(STEP_TIME.key)
    if main is None:
        return Why(Level.NOTE, [no_record(store)])
    step = known.get(STEP_TIME.key, main)
    count = _peer_count(store, rank)
    if not count or main.deviation is None:
        return Why(
            Level.NOTE, ["no other rank has the same work to compare with", *_device(store, rank, known)]
        )
    others = f"{count} peers" if count > 1 else "the other rank"
    if (stage := _stage(store, rank)) is not None:
        others += f" of pp{stage}"
    text = f"{main.metric.title} {main.value:.0f} ms, {format.excess(main.deviation)}"
    against = f"{others} {'have' if count > 1 else 'has'} {main.peers:.0f} ms"
    # A rank that has only one peer is clearly slow only from the deviation at which the grid marks it.
    limit = max(SLOW, outlier_distance(store) if count == 1 or store.oversubscribed else SLOW)
    slow = main.deviation >= limit and main.excess >= NOTABLE * step.value
    slow |= rank in alerted_ranks(store, "straggler")
    causes = [*_grown(known, step.value), *_device(store, rank, known), *_work(known)]
    if slow:
        return Why(
            Level.WARN, [f"slow: {text}", against, *causes, *_waits(known, step.value), *_node(store, rank)]
        )
    if rank in alerted_ranks(store, "throttle", "stall"):
        return Why(Level.WARN, [text, against, *causes])
    if main.deviation >= SLOW:
        return Why(Level.NOTE, [text, against, *causes])
    return Why(Level.GOOD, [text, against, *_device(store, rank, known)])


def _peer_count(store: Store, rank: int) -> int:
    keys = peers(store)
    return sum(key == keys[rank] for key in keys.values()) - 1 if rank in keys else 0


def _stage(store: Store, rank: int) -> int | None:
    return store.state.hellos[rank].coords.get("pp")


def _grown(known: dict[str, Fact], step_ms: float) -> Iterator[str]:
    """The phases in which the rank is slower than its peers, the largest difference first."""
    longer = [
        fact for key, fact in known.items() if key.startswith(PHASE) and fact.excess > NOTABLE * step_ms
    ]
    for fact in sorted(longer, key=lambda fact: -fact.excess)[:2]:
        yield f"{format.clean(fact.metric.key.removeprefix(PHASE))} +{fact.excess:.0f} ms"


def _device(store: Store, rank: int, known: dict[str, Fact]) -> Iterator[str]:
    vitals = store.state.vitals.get(rank)
    if vitals and vitals.throttle:
        yield f"throttled by {', '.join(format.clean(reason) for reason in vitals.throttle)}"
    clock = known.get(CLOCK.key)
    if clock and clock.deviation is not None and clock.deviation <= -NOTABLE:
        yield f"SM clock {clock.value:.0f} MHz, {format.excess(clock.deviation)}"
    if vitals and vitals.power_limit_w and (vitals.power_w or 0.0) >= FULL * vitals.power_limit_w:
        yield f"at its power limit of {vitals.power_limit_w:.0f} W"
    if vitals and _memory_share(vitals) >= FULL:
        yield f"device memory {100 * _memory_share(vitals):.0f} % full"


def _memory_share(vitals: Vitals) -> float:
    used, total = vitals.device_memory_bytes, vitals.device_memory_total
    return used / total if used is not None and total else 0.0


def _work(known: dict[str, Fact]) -> Iterator[str]:
    tokens = known.get(TOKENS.key)
    if tokens and tokens.deviation is not None and tokens.deviation >= NOTABLE:
        yield f"{format.excess(tokens.deviation)} tokens"


def _waits(known: dict[str, Fact], step_ms: float) -> Iterator[str]:
    """The sentence stating that the rank waits less than its peers, which shows that the peers wait for this rank."""
    waiting = known.get(WAITING.key)
    if waiting and waiting.peers is not None and -waiting.excess >= NOTABLE * step_ms:
        yield f"waits {waiting.value:.0f} ms, its peers {waiting.peers:.0f}"


def _node(store: Store, rank: int) -> Iterator[str]:
    """The sentence stating that a whole node is slow."""
    host = store.state.hellos[rank].host
    on_it = [other for other, hello in store.state.hellos.items() if hello.host == host]
    if len(on_it) < 2 or len(on_it) == len(store.state.hellos):
        return
    metric = available(store)[0]
    levels = levels_of(store, metric, read(store, metric))
    slow = sum(levels[other] is Level.WARN for other in on_it)
    if slow > 1 and slow >= OF_NODE * len(on_it):
        yield f"{slow} of {len(on_it)} ranks of {format.clean(host)} are slow"
