"""Ranked changes of one setting by the planner, for the knob board and for a restart. Imported by the worker's thread
only, because it imports the planner."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from agents.protocol import Changes
from cockpit.knobs.edits import same
from cockpit.knobs.plan.outlook import Outlook, Planner
from cockpit.knobs.plan.settings import SETTINGS, legal_values
from engine.planner.advice import SHARED_CORES, Advice, Candidate, Evidence, advise, bottleneck
from engine.planner.roofline import Level, roofline
from engine.planner.scaling import Kind, Point, scaling

# These change what is trained or what it costs, so they are no advice; the what-if has them.
NOT_ADVISED = {"capacity_factor", "ranks", "global_batch", "seq_len", "precision", "machine"}

Live = Collection[tuple[str, object]]
"""The values that the board of the run can take now, by name of the knob."""


@dataclass(frozen=True)
class Suggestions:
    """`live`: changes that the knob board can make; `restart`: changes of the layout. `peaks`: planned bytes of the
    rank that needs most, by change."""

    live: Advice
    restart: Advice
    peaks: dict[str, float]


def suggestions(
    planner: Planner, evidence: Evidence | None, live: Live, refuted: Sequence[tuple[Changes, str]]
) -> Suggestions:
    """Plan each value of each setting alone, and rank the values by the step time that they would save."""
    evidence = evidence or Evidence(0.0)
    if planner.told.shared:
        found = bottleneck(evidence) if evidence.step_ms else None
        empty = Advice(found, [], [], [], SHARED_CORES)
        return Suggestions(empty, empty, {})
    now = planner.outlook({})
    now_ms = 1e3 * now.step_s.likely if now.step_s else None
    groups: dict[bool, list[Candidate]] = {True: [], False: []}
    peaks: dict[str, float] = {}
    for changes, outlook in _planned(planner):
        candidate = _candidate(changes, outlook, now_ms)
        peaks[candidate.words] = outlook.memory.peak
        groups[all(change in live for change in changes.items())].append(candidate)
    known = evidence if evidence.step_ms else Evidence(now_ms or 1.0)
    return Suggestions(advise(known, groups[True], refuted), advise(known, groups[False], refuted), peaks)


def _planned(planner: Planner) -> Iterator[tuple[Changes, Outlook]]:
    layout = planner.basis.layout
    for setting in SETTINGS:
        if setting.name in NOT_ADVISED or not setting.applies(layout):
            continue
        now = setting.get(layout)
        for value in legal_values(layout, {}, setting):
            if not same(value, now):
                yield {setting.name: value}, planner.outlook({setting.name: value})


def _candidate(changes: Changes, outlook: Outlook, now_ms: float | None) -> Candidate:
    span = outlook.step_s
    does_not_fit = ""
    if outlook.fits is False and outlook.capacity is not None:
        does_not_fit = outlook.memory.sentence(outlook.capacity)
    after = (1e3 * span.low, 1e3 * span.high) if span else None
    return Candidate(
        changes, now_ms, after, 1e3 * span.likely if span else None, outlook.source, does_not_fit
    )


def levels(planner: Planner, outlook: Outlook) -> tuple[Level, ...]:
    """The communication roofline of a planned job on each level of links."""
    release = planner.basis.layout.plan.release
    return roofline(planner.job(outlook.layout), planner.machine(outlook), release)


def scaled(planner: Planner, outlook: Outlook, kind: Kind) -> list[Point]:
    """The planned job on growing numbers of data-parallel ranks."""
    release = planner.basis.layout.plan.release
    return scaling(planner.job(outlook.layout), planner.machine(outlook), kind, release=release)
