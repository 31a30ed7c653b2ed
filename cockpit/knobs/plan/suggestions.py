"""The planner's advice: changes to a single setting, ranked by predicted step time. Knob changes, which a running job
can apply, and layout changes, which need a restart, are ranked separately. This module imports the planner, so only the
worker thread and `cockpit advise` import it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agents.protocol import Changes
from cockpit.data.diagnosis.evidence import evidence
from cockpit.data.store import Store
from cockpit.knobs.advice import legal_changes, refuted
from cockpit.knobs.edits import same
from cockpit.knobs.plan import run as runs
from cockpit.knobs.plan.outlook import Outlook, Planner
from cockpit.knobs.plan.settings import SETTINGS, legal_values
from cockpit.knobs.values import value_knobs
from engine.config.refusal import RefusedError
from engine.planner.advice import SHARED_CORES, Advice, Candidate, Evidence, advise, bottleneck
from engine.planner.roofline import Level, roofline
from engine.planner.scaling import Kind, Point, scaling

# These settings change the training itself or its cost, so they are not advised; the what-if offers them.
NOT_ADVISED = {"capacity_factor", "ranks", "global_batch", "seq_len", "precision", "machine"}


@dataclass(frozen=True)
class Suggestions:
    """`live`: changes of knobs, which a running job can apply; `restart`: changes to the layout, which need a restart.
    `peaks`: for each change, the predicted peak memory, in bytes, of the rank that needs the most."""

    live: Advice
    restart: Advice
    peaks: dict[str, float]


def suggestions(
    planner: Planner,
    measured: Evidence | None,
    live: Sequence[Changes],
    tried: Sequence[tuple[Changes, str]],
) -> Suggestions:
    """Predict the effect of each change separately, and rank the changes by the step time that they would save. `live`:
    the changes that the running job's knob board would accept now (`legal_changes`); all others need a restart."""
    measured = measured or Evidence(0.0)
    if planner.reported.shared:
        found = bottleneck(measured) if measured.step_ms else None
        empty = Advice(found, [], [], [], SHARED_CORES)
        return Suggestions(empty, empty, {})
    now = planner.outlook({})
    now_ms = 1e3 * now.step_s.likely if now.step_s else None
    turned = {name for changes in live for name in changes}
    restart = [changes for changes in _of_the_layout(planner) if turned.isdisjoint(changes)]
    groups: dict[bool, list[Candidate]] = {True: [], False: []}
    peaks: dict[str, float] = {}
    for on_board, changes in [(True, one) for one in live] + [(False, one) for one in restart]:
        try:
            outlook = planner.outlook(changes)
        except RefusedError as refusal:
            groups[on_board].append(Candidate(changes, now_ms, None, source=str(refusal)))
            continue
        candidate = _candidate(changes, outlook, now_ms)
        peaks[candidate.words] = outlook.memory.peak
        groups[on_board].append(candidate)
    known = measured if measured.step_ms else Evidence(now_ms or 1.0)
    return Suggestions(advise(known, groups[True], tried), advise(known, groups[False], tried), peaks)


def advised(store: Store) -> Advice | None:
    """The knob changes that the plan screen would advise for the running job, for commands that show no screen. None if
    this process cannot read the run's layout or the planner cannot model the run; the caller must then send preview
    queries to the run."""
    reported = runs.reported(store, None)
    try:
        if reported is None or store.state.board is None:
            return None
        planner = Planner(reported, runs.basis(reported), runs.measured(store))
    except (RefusedError, ModuleNotFoundError):
        return None
    values = {knob.name: knob.value for knob in value_knobs(store.state.board)}
    tried = refuted(store.state.trials.values(), values)
    return suggestions(planner, evidence(store), legal_changes(store), tried).live


def _of_the_layout(planner: Planner) -> Iterator[Changes]:
    """Yield every change of a single layout setting to another legal value, except for the settings in NOT_ADVISED."""
    layout = planner.basis.layout
    for setting in SETTINGS:
        if setting.name in NOT_ADVISED or not setting.applies(layout):
            continue
        now = setting.get(layout)
        for value in legal_values(layout, {}, setting):
            if not same(value, now):
                yield {setting.name: value}


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
    """The communication roofline of the job that `outlook` predicts: one `Level` for each level of the network, such as
    the links within a node and those between nodes."""
    release = planner.basis.layout.plan.release
    return roofline(planner.job(outlook.layout), planner.machine(outlook), release)


def scaled(planner: Planner, outlook: Outlook, kind: Kind) -> list[Point]:
    """Predictions for the job of `outlook` on increasing numbers of data-parallel ranks."""
    release = planner.basis.layout.plan.release
    return scaling(planner.job(outlook.layout), planner.machine(outlook), kind, release=release)
