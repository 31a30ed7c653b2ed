"""Compares the times of one step with those of a usual step: which times grew, on which rank or stage, and what
happened at that step.

The times of the usual step are medians over the kept steps with the same knob values or, if these are too few, over all
kept steps. The slow rank is identified by its own time, the step time without waiting for other ranks. When a single
rank is slow, the step time grows on every rank, because the other ranks wait for it in collectives.
"""

import math
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from agents.protocol import Summary
from cockpit.data import format
from cockpit.data.curves.segments import segments
from cockpit.data.history.metric_table import PHASE
from cockpit.data.history.phases import StepPhases
from cockpit.data.history.rank_values import OWN, STEP, WAIT, ByRank
from cockpit.data.log.run_log import Kind, LogEntry, log_entries
from cockpit.data.metrics import median
from cockpit.data.store import Store, Topic

COMPARED = 32  # maximum number of steps from which the usual step is computed
OWN_STEPS = 9  # maximum number of steps from which the usual value of a single rank is computed
FEWEST = 4  # with fewer steps, there is no usual step
NOTABLE = 0.05  # growth of the step time from which a step is called slow
CAUSE = 0.4  # share of the step's growth from which a quantity is called its cause
WHOLE = 0.6  # growth of a stage's median over that of its worst rank, from which the whole stage has grown
MOST_ENTRIES = 4
RECENT = 4  # cached steps whose records are still arriving


@dataclass(frozen=True)
class Growth:
    """One quantity of a step, such as the forward or the waiting time, in the compared step and in the usual step, on
    the stage where this quantity grew most."""

    quantity: str
    stage: int
    rank: int  # the rank with the highest value
    ms: float
    usual_ms: float
    whole: bool  # whether the time of the whole stage has grown, not only that of one rank

    @property
    def grown_ms(self) -> float:
        return self.ms - self.usual_ms


@dataclass(frozen=True)
class Usual:
    """The usual step: medians over `steps` kept steps. `values`: for each quantity (such as the forward time) and
    stage, two numbers. Each step has a median and a maximum over the ranks of the stage; the first number is the median
    of these medians over the steps, the second is the median of these maxima."""

    steps: int
    step_ms: float
    same_knobs: bool
    values: dict[tuple[str, int], tuple[float, float]]


@dataclass(frozen=True)
class Comparison:
    """The times of a step (`phases`) compared with those of the usual step (`usual`)."""

    phases: StepPhases
    usual: Usual
    growths: list[Growth]  # own time, phases and waiting, in descending order of growth
    cause: str  # the times that grew, as a part of a sentence; "" if the step is not slow

    @property
    def grown(self) -> float:
        """The growth of the step time as a fraction: 0.5 is 50 % slower than usual."""
        return self.phases.step_ms / self.usual.step_ms - 1 if self.usual.step_ms else 0.0


def phases_at(store: Store, step: int | None) -> StepPhases | None:
    """For each stage, and for each of the times of a step (such as forward or waiting), the median and the highest
    value over the stage's ranks. For a step that has just been reported, these times are computed from the records of
    the ranks."""
    kept = store.phases.get(step)
    if kept or step is None:
        return kept
    found = _recent(store, step)
    return found[0] if found else None


def by_rank_at(store: Store, step: int | None) -> ByRank | None:
    """The values of every rank in a step; None if they are not kept."""
    kept = store.phases.by_rank(step)
    if kept or step is None:
        return kept
    found = _recent(store, step)
    return found[1] if found else _from_history(store, step)


def _from_history(store: Store, step: int) -> ByRank | None:
    """The step time, own time and phases of every rank in one of the newest steps. The history does not contain waiting
    and idle times."""
    history = store.rank_history
    keys = [STEP, OWN, *(PHASE + name for name in history.phases)]
    columns = {key: array("f", column) for key in keys if (column := history.column(key, step))}
    size = max(map(len, columns.values()), default=0)
    for column in columns.values():
        column.extend([math.nan] * (size - len(column)))
    return ByRank(array("l", history.ranks[:size]), columns) if STEP in columns else None


def _recent(store: Store, step: int) -> tuple[StepPhases, ByRank] | None:
    return store.once(
        ("recent phases", step % RECENT), (Topic.RANKS,), lambda: store.phases.recent(step), step
    )


def usual(store: Store, revision: int) -> Usual | None:
    """The medians of a step's times over the kept steps with the knob values of `revision` or, if these steps are too
    few, over all kept steps. None if fewer than `FEWEST` steps are kept."""
    return store.once(("usual", revision), (), lambda: _usual(store, revision), store.phases.revision)


def _usual(store: Store, revision: int) -> Usual | None:
    kept = [found for step in store.phases.steps if step > 0 and (found := store.phases.get(step))]
    same = [one for one in kept if one.revision == revision]
    chosen = same if len(same) >= FEWEST else kept
    if len(chosen) < FEWEST:
        return None
    stride = -(-len(chosen) // COMPARED)
    chosen = chosen[::-1][::stride]
    values = {}
    for quantity in dict.fromkeys(name for one in chosen for name in one.spreads):
        for stage in chosen[0].stages:
            spreads = [one.spread(quantity, stage) for one in chosen]
            spreads = [spread for spread in spreads if spread.known]
            if spreads:
                values[quantity, stage] = (
                    median(spread.median for spread in spreads) or 0.0,
                    median(spread.worst for spread in spreads) or 0.0,
                )
    times = median(one.step_ms for one in chosen) or 0.0
    return Usual(len(chosen), times, len(same) >= FEWEST, values)


def compare(store: Store, step: int | None) -> Comparison | None:
    """Compare a step with the usual step; None if the times of this step are unknown, or too few steps are kept."""
    phases = phases_at(store, step)
    against = usual(store, phases.revision) if phases else None
    if phases is None or against is None:
        return None
    return store.once(
        ("compare", phases.step % 8),
        (),
        lambda: _compare(store, phases, against),
        (phases.step, phases.ranks, store.phases.revision),
    )


def _compare(store: Store, phases: StepPhases, against: Usual) -> Comparison:
    growths = []
    for quantity in phases.spreads:
        if quantity == OWN or quantity.startswith((PHASE, WAIT)):
            per_stage = [_growth(phases, against, quantity, stage) for stage in phases.stages]
            known = [one for one in per_stage if one]
            if known:
                growths.append(max(known, key=lambda one: one.grown_ms))
    growths = [_of_rank(store, phases, one) for one in growths]
    growths.sort(key=lambda one: -one.grown_ms)
    found = Comparison(phases, against, growths, "")
    if found.grown < NOTABLE:
        return found
    return Comparison(phases, against, growths, _cause(store, found))


def _growth(phases: StepPhases, against: Usual, quantity: str, stage: int) -> Growth | None:
    spread = phases.spread(quantity, stage)
    before = against.values.get((quantity, stage))
    if not spread.known or before is None:
        return None
    grown = spread.worst - before[1]
    whole = grown > 0 and spread.median - before[0] >= WHOLE * grown
    return Growth(quantity, stage, spread.rank, spread.worst, before[1], whole)


def _of_rank(store: Store, phases: StepPhases, growth: Growth) -> Growth:
    """`growth` relative to the median of the same rank's values in other steps, if enough steps with per-rank values
    are kept; otherwise `growth` unchanged. The maximum over the stage is no valid reference for this rank, because
    another rank of the stage may be slow at every step."""
    if growth.whole:
        return growth
    found = []
    for step in reversed(store.phases.steps):
        kept, by_rank = store.phases.get(step), store.phases.by_rank(step)
        if by_rank and kept and kept.revision == phases.revision and step not in (0, phases.step):
            found.append(by_rank.of(growth.rank).get(growth.quantity, math.nan))
            if len(found) == OWN_STEPS:
                break
    before = median(found)
    return growth if before is None or len(found) < FEWEST else replace(growth, usual_ms=before)


def _cause(store: Store, found: Comparison) -> str:
    grown_ms = found.phases.step_ms - found.usual.step_ms
    own = next((one for one in found.growths if one.quantity == OWN), None)
    phase = next((one for one in found.growths if one.quantity.startswith(PHASE)), None)
    wait = next((one for one in found.growths if one.quantity.startswith(WAIT)), None)
    if own and own.grown_ms >= CAUSE * grown_ms:
        phases = _phases(store, own, found)
        return f"{_who(store, own, found)} took {_ms(own.grown_ms)} longer, without waiting: {phases}"
    if own is None and phase and phase.grown_ms >= CAUSE * grown_ms:
        return f"{name_of(phase.quantity)} took {_ms(phase.grown_ms)} longer on {_who(store, phase, found)}"
    if wait and wait.grown_ms >= CAUSE * grown_ms:
        rest = " · no rank was slow by itself" if own else ""
        return f"waiting in {name_of(wait.quantity)} grew by {_ms(wait.grown_ms)} on {_who(store, wait, found)}{rest}"
    return f"no reported time grew as much as the step ({_ms(grown_ms)})"


def _who(store: Store, growth: Growth, found: Comparison) -> str:
    """Text that names where the time in `growth` increased: one rank, all ranks of a stage, or all ranks."""
    if not growth.whole:
        return store.name(growth.rank)
    stages = found.phases.stages
    each = [_growth(found.phases, found.usual, growth.quantity, stage) for stage in stages]
    alike = [one for one in each if one and one.whole and one.grown_ms >= WHOLE * growth.grown_ms]
    if len(alike) == len(stages):
        return "all ranks"
    return f"all ranks of pp{growth.stage}"


def _phases(store: Store, own: Growth, found: Comparison) -> str:
    """Text that names the phases whose time grew most: on the slow rank or, if the whole stage is slow, on the
    stage."""
    at_rank = by_rank_at(store, found.phases.step)
    now = at_rank.of(own.rank) if at_rank and not own.whole else {}
    grown = []
    for quantity in found.phases.spreads:
        before = found.usual.values.get((quantity, own.stage))
        if quantity.startswith(PHASE) and before:
            ms = now.get(quantity, found.phases.spread(quantity, own.stage).worst)
            if math.isfinite(ms):
                grown.append((ms - before[0 if now else 1], quantity))
    grown = [one for one in sorted(grown, reverse=True) if one[0] >= 0.1 * own.grown_ms][:3]
    if not grown:
        return "in none of the phases that it reports"
    return ", ".join(f"{name_of(quantity)} +{_ms(ms)}" for ms, quantity in grown)


def _ms(value: float) -> str:
    return format.duration_ms(value).strip()


def name_of(quantity: str) -> str:
    """The name of a quantity on the screen, such as ``forward`` or ``dp``."""
    return format.clean(quantity.partition(":")[2] or quantity)


def verdict(comparison: Comparison) -> str:
    """One sentence: how slow the step was, and which times grew."""
    grown = comparison.grown
    against = f"{format.excess(grown)} against the usual {_ms(comparison.usual.step_ms)}"
    if not comparison.cause:
        return against if grown < -NOTABLE else f"{against}: nothing unusual"
    return f"{against}: {comparison.cause}"


# ------------------------------------------------------------------------------------- at that time


def step_times(store: Store) -> list[tuple[int, float]]:
    """The curve of the step time as (step, ms) pairs: one pair for each recent step; for older steps, the minimum and
    the maximum of each bucket.
    """
    return store.once("step times", (Topic.CURVES,), lambda: _find(store))


def _find(store: Store) -> list[tuple[int, float]]:
    found = [point for one in segments(store.state, "step_ms") for point in one.points]
    if not found:  # a loop that sends no summaries
        found = [(step, store.phases.time_ms(step) or 0.0) for step in store.phases.steps]
    return [(step, ms) for step, ms in found if math.isfinite(ms)]


def summary_at(store: Store, step: int) -> Summary | None:
    """The summary of a step; None if the state no longer keeps it, even if the curves still cover the step."""
    summaries = store.state.summaries
    at = bisect_left(summaries, step, key=lambda one: one.step)
    return summaries[at] if at < len(summaries) and summaries[at].step == step else None


def happened(store: Store, step: int) -> list[str]:
    """What happened at a step: knob changes, alerts and other log entries, and unusually high values in the step's
    summary."""
    found = [
        f"{entry.kind.value}: {entry.text.removeprefix('over: ')}"
        for entry in log_entries(store)
        if entry.step is not None and step in _steps_of(entry, entry.step)
    ]
    summary = summary_at(store, step)
    return [*found[-MOST_ENTRIES:], *(_routing(store, summary) if summary else ())]


def _steps_of(entry: LogEntry, step: int) -> tuple[int, ...]:
    """For a log entry with the step number `step`: the steps whose comparison with the usual step lists this entry. A
    step that was estimated from the entry's time had already ended at that time, so the entry belongs to the next step.
    An alert may be raised one step late, so it is also listed for the previous step."""
    if entry.estimated:
        return (step + 1,)
    return (step - 1, step) if entry.kind is Kind.ALERT else (step,)


def _routing(store: Store, summary: Summary) -> Iterator[str]:
    others = [one for one in store.state.summaries[-256:] if one.revision == summary.revision and one.step]
    for words, get in _ROUTING:
        value, middle = get(summary), median(v for one in others if (v := get(one)) is not None)
        if value is not None and middle is not None and not value <= 1.25 * middle + 1e-9:  # or NaN
            yield f"{words} {value:.3g}, usually {middle:.3g}"


_ROUTING: tuple[tuple[str, Callable[[Summary], float | None]], ...] = (
    ("expert load, highest over mean,", lambda summary: summary.load_max_over_mean),
    ("dropped pairs", lambda summary: summary.dropped),
    ("gradient norm", lambda summary: summary.grad_norm),
)
