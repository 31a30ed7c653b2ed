"""Diagnoses of a run without alerts: a hot expert, exposed collectives, a bubble, slow data loading, or none of these.

The hub raises no alerts for these conditions, because they are properties of a layout and not faults.
"""

from collections.abc import Callable
from dataclasses import dataclass

from agents.protocol import PREVIEWS, Summary, TrialState
from cockpit.data import format
from cockpit.data.diagnosis.evidence import evidence
from cockpit.data.diagnosis.statement import Diagnosis, Level
from cockpit.data.history.experts import HOT
from cockpit.data.history.pivot import pivot
from cockpit.data.log.outcomes import ratio_text, trial_changes
from cockpit.data.metrics import median
from cockpit.data.store import Store, Topic
from engine.planner.advice import EXCHANGES, bottleneck

WAITS_NOTE, WAITS_WARN = 0.25, 0.5  # share of the step in exposed collectives
EXPOSED = 0.35  # the same for one axis
BUBBLE = 0.2  # idle share of the pipeline
DATA = 0.2  # share of the time in which a step waits for its data
DATA_PHASES = ("data", "load", "dataloader")
RECENT = 5  # number of newest steps whose median is evaluated
ADVICE = {
    "ep": "keep expert groups within a node, or lower capacity_factor: 5 Traffic",
    "tp": "keep tp within a node: 5 Traffic shows what each axis costs",
    "cp": "a smaller cp, or fewer micro-batches of more tokens: 5 Traffic",
    "dp": "a larger batch, or fewer replicas of more stages: 7 Plan, 5 Traffic",
    "data": "more workers or prefetching for the data loader",
}
FEWER_GATHERS = "zero 2 needs more memory, but gathers weights less often: 7 Plan"


def hot_expert(store: Store) -> Diagnosis | None:
    """Names the most loaded expert. The hub raises an alert when the router of a layer has collapsed, but not for a
    single hot expert."""
    experts = store.state.experts
    hot = [
        (max(layer.load) * len(layer.load) / sum(layer.load), layer)
        for layer in (experts.layers if experts else [])
        if sum(layer.load)
    ]
    if not hot:
        return None
    ratio, layer = max(hot, key=lambda pair: pair[0])
    recent = [one.load_max_over_mean for one in store.state.summaries[-RECENT:]]
    passing = any(one is not None and one < HOT for one in recent) or 0 < len(recent) < RECENT
    if ratio < HOT or passing:
        return None
    expert = layer.load.index(max(layer.load))
    since = began(
        store,
        lambda summary: None if summary.load_max_over_mean is None else summary.load_max_over_mean >= HOT,
    )
    text = f"expert {expert} of layer {layer.layer} carries {ratio:.1f}× its share"
    return Diagnosis(
        Level.WARN, text, cause="hot_expert", since=since, advice=_balancing_advice(store, "4 Experts")
    )


def _balancing_advice(store: Store, screen: str) -> str:
    known = {knob.name for knob in store.state.board.knobs} if store.state.board else set()
    stronger = next((name for name in ("aux_loss_coef", "bias_rate") if name in known), None)
    return f"a higher {stronger} balances it; {screen} shows all" if stronger else f"{screen} shows all"


def exchange_bound(store: Store) -> Diagnosis | None:
    """Names the axis whose exposed collectives take a large share of a step."""
    summary = store.summary
    if store.oversubscribed or summary is None:
        return None
    recent = store.state.summaries[-RECENT:]
    shares = {
        axis: median(exposed_share(one, axis) for one in recent) or 0.0
        for axis in summary.comm
        if axis in EXCHANGES
    }
    axis = max(shares, key=lambda name: shares[name], default=None)
    if axis is None or shares[axis] < EXPOSED:
        return None
    share = shares[axis]
    text = (
        f"{EXCHANGES[axis]} take {100 * share:.0f} % of a step, {format.grouped(share * summary.step_ms)} of "
        f"{format.grouped(summary.step_ms)} ms, not hidden by computation"
    )
    since = began(store, lambda one: exposed_share(one, axis) >= EXPOSED)
    gathers = axis == "dp" and summary.knobs.get("zero") == 3
    return Diagnosis(
        Level.WARN, text, cause=axis, since=since, advice=FEWER_GATHERS if gathers else ADVICE[axis]
    )


def exposed_share(summary: Summary, axis: str) -> float:
    """Exposed time in the collectives of an axis as a share of the step time, from 0 to 1."""
    traffic = summary.comm.get(axis)
    return min(1.0, traffic.exposed_ms / summary.step_ms) if traffic and summary.step_ms else 0.0


def bubble_bound(store: Store) -> Diagnosis | None:
    summary = store.summary
    if store.oversubscribed or not summary or summary.bubble is None or summary.bubble < BUBBLE:
        return None
    text = f"bubble-bound: the stages idle {format.percent(summary.bubble).strip()} of the time"
    now, advice = summary.knobs.get("micro_batches"), ""
    if isinstance(now, int):
        text += f" with {format.counted(now, 'micro-batch')}"
        advice = _more_micro_batches(store, now)
    since = began(store, lambda one: None if one.bubble is None else one.bubble >= BUBBLE)
    return Diagnosis(Level.WARN, text, cause="bubble", since=since, advice=advice)


def _more_micro_batches(store: Store, now: int) -> str:
    """Advice for a run that has a pipeline bubble with `now` micro-batches: how to find out whether a larger number
    makes steps faster. If an earlier trial in this run has shown that a larger number does not, or if no larger number
    is legal, the advice says that instead."""
    refuted = [trial for trial in store.state.trials.values() if _refutes_more(trial, now)]
    if refuted:
        trial = refuted[-1]
        return f"a trial of {trial_changes(trial)} was not faster: step time {ratio_text(trial)}"
    board = store.state.board
    legal = next((k.legal for k in board.knobs if k.name == "micro_batches"), None) if board else None
    more = [one for one in legal.choices if isinstance(one, int) and one > now] if legal else []
    if legal and not more:
        return "no larger number is legal here"
    if not more:
        return "try more"
    hellos = store.state.hellos.values()
    if store.fact("folder") and any(hello.layout for hello in hellos):
        return "7 Plan and cockpit advise rank the changes"  # the planner can read the layout of such a run
    if any(hello.leader and PREVIEWS in hello.capabilities for hello in hellos):
        return "cockpit advise previews larger numbers"
    # Without a prediction, the smallest increase is the smallest risk.
    return f"cockpit try micro_batches={min(more)} measures whether more helps"


def _refutes_more(trial: TrialState, now: int) -> bool:
    """Whether the trial raised micro_batches from the current number (`now`), changed no other knob, and was reverted
    after its measurement."""
    name, tried_with = "micro_batches", trial.changes.get("micro_batches")
    alone = set(trial.changes) == {name} and trial.before.get(name) == now
    more = isinstance(tried_with, int) and tried_with > now
    return alone and more and trial.state == "reverted" and trial.ratio is not None


@dataclass(frozen=True)
class Medians:
    """Medians over the newest step records of the ranks, in ms; 0 if no rank has a value."""

    step_ms: float
    phases: dict[str, float]  # by phase, in the order in which ranks report them
    waited_ms: float
    metered: bool  # whether a rank reports its traffic


def medians(store: Store) -> Medians:
    """The medians of the step time, of each phase and of the exposed communication, over the newest records of the
    ranks. All rules of this module share the result, which is cached until a rank reports again."""
    return store.once("medians", (Topic.RANKS,), lambda: _medians(store), id(store.state))


def _medians(store: Store) -> Medians:
    records = list(store.state.steps.values())
    phases = pivot([record.phases for record in records])
    comm = pivot([record.comm for record in records])
    exposed = [[0.0 if one is None else one.exposed_ms for one in traffic] for traffic in comm.values()]
    return Medians(
        median(record.step_ms for record in records) or 0.0,
        {name: median(one for one in ms if one is not None) or 0.0 for name, ms in phases.items()},
        median(map(sum, zip(*exposed, strict=True))) or 0.0,
        bool(comm),
    )


def data_bound(store: Store) -> Diagnosis | None:
    """Detects slow data loading, if the training loop reports a phase for it."""
    found = medians(store)
    step_ms = found.step_ms
    waits = {name: found.phases.get(name, 0.0) for name in DATA_PHASES}
    name = max(waits, key=lambda one: waits[one])
    if not step_ms or waits[name] < DATA * step_ms:
        return None
    text = f"data-bound: {name} takes {100 * (waits[name] / step_ms):.0f} % of a step, "
    text += f"{format.grouped(waits[name])} of {format.grouped(step_ms)} ms"
    return Diagnosis(Level.WARN, text, cause="data", advice=ADVICE["data"])


def time_shares(store: Store) -> Diagnosis | None:
    """The diagnosis if no other rule applies: the longest phase of a step, and the share of the step spent in exposed
    collectives."""
    middle = medians(store)
    step_ms = middle.step_ms
    if not step_ms and store.summary:
        return _job_shares(store.summary)
    if not step_ms:
        return Diagnosis(
            Level.NOTE, f"{len(store.present)}/{store.world} ranks have joined; no step is done yet"
        )
    # In a loop that uses `agents.join`, the vote takes place after the reported step, so `step_ms` excludes it.
    whole_ms = max(step_ms, sum(middle.phases.values()))
    shares = {name: ms / whole_ms for name, ms in middle.phases.items()}
    phase = max(shares, key=lambda name: shares[name], default=None)
    waits = min(1.0, middle.waited_ms / step_ms)
    parts = [f"{phase} takes {100 * shares[phase]:.0f} % of a step"] if phase else []
    if middle.metered:  # a loop that reports no traffic may still wait for it
        parts.append(f"exposed traffic {100 * waits:.0f} %")
    level, advice = Level.GOOD if waits < WAITS_NOTE else Level.NOTE, ""
    if waits >= WAITS_WARN and not store.oversubscribed:  # with shared cores, ranks wait for the cores
        level = Level.WARN
        if found := evidence(store):
            parts, advice = [format.spaced(bottleneck(found).sentence)], "cockpit advise ranks changes"
    text = " · ".join(parts) or f"a step takes {format.duration_ms(step_ms).strip()}"
    return Diagnosis(level, text, advice=advice)


def _job_shares(summary: Summary) -> Diagnosis:
    """The diagnosis for a client that receives no per-rank records: the share of the step time spent in exposed
    communication, averaged over ranks."""
    if not summary.comm:
        return Diagnosis(Level.GOOD, f"a step takes {format.duration_ms(summary.step_ms).strip()}")
    exposed = sum(exposed_share(summary, axis) for axis in summary.comm)
    level = Level.GOOD if exposed < WAITS_NOTE else Level.NOTE
    return Diagnosis(level, f"exposed traffic {100 * min(1.0, exposed):.0f} % of a step, mean over ranks")


def began(store: Store, holds: Callable[[Summary], bool | None]) -> int | None:
    """The step since which the condition has held without interruption. None if the condition has always held, or does
    not hold now.

    `holds` returns None for a summary that lacks the value to be checked; such a step is ignored.
    """
    first = None
    for summary in reversed(store.state.summaries):
        held = holds(summary)
        if held:
            first = summary.step
        elif held is False:
            return first
    return None
