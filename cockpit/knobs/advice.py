"""The input of the planner's advice: legal changes of one knob with their previews, and the changes to leave out,
because a trial did not show that they make steps faster. This module also formats a ranked change for `cockpit advise`
and the plan screen."""

from collections.abc import Iterable, Mapping

from agents.protocol import Changes, Estimate, Previewed, TrialState, Value
from cockpit.data import format
from cockpit.data.log.outcomes import ratio_text
from cockpit.data.store import Store
from cockpit.knobs.edits import same
from cockpit.knobs.values import candidates, value_knobs
from engine.planner.advice import FULL, Candidate, Ranked

MOST = 32  # maximum number of candidates, because the leader computes a preview for each
DOES_NOT_FIT = "does not fit"
UNDECIDED = "undecided"
ON_THE_BOARD = "on the knob board"
NONE_FASTER = "no change is likely to make steps faster"


def legal_changes(store: Store) -> list[Changes]:
    """For each knob that does not change the loss, one change to each of its other legal values. For a knob with a
    range, only a few round values in the range are included."""
    found = [
        {knob.name: value}
        for knob in value_knobs(store.state.board)
        if knob.loss_neutral
        for value in candidates(knob)
        if not same(value, knob.value)
    ]
    return found[:MOST]


def candidate(changes: Changes, answer: Previewed, memory_share: float | None = None) -> Candidate:
    """Make a candidate for advice from a knob change and the run's answer to the preview query about this change.
    `memory_share`: the share of memory in use on the fullest device. A change does not fit if it would use so much
    memory that the hub raises an alert."""
    estimates = {one.quantity: one for one in answer.estimates}
    step, peak = estimates.get("step_ms", Estimate("step_ms", source=answer.why)), estimates.get("peak_bytes")
    after = step.interval or (None if step.after is None else (step.after, step.after))
    fits = (
        ""
        if peak is None or DOES_NOT_FIT not in peak.source
        else peak.source[peak.source.index(DOES_NOT_FIT) :]
    )
    if not fits and memory_share and peak and peak.now and peak.after and peak.after > peak.now:
        share = memory_share * peak.after / peak.now
        fits = f"would fill {100 * share:.0f} % of a device's memory" if share > FULL else ""
    return Candidate(changes, step.now, after, step.after, step.source, fits)


def refuted(trials: Iterable[TrialState], values: Mapping[str, Value]) -> list[tuple[Changes, str]]:
    """Changes that were tried from the current `values` and reverted because they did not clearly make steps faster,
    each with the measured change of the step time as text."""
    return [
        (trial.changes, f"step time {ratio_text(trial)}")
        for trial in trials
        if trial.state == "reverted"
        and trial.high is not None
        and trial.high >= 1.0
        and all(name in values and same(values[name], was) for name, was in trial.before.items())
    ]


def interval_text(one: Ranked, digits: int = 1) -> str:
    """The interval of the change in step time, as text such as ``-10.2 .. -6.0 %``."""
    return f"{format.signed(-100 * one.most, digits)} .. {format.signed(-100 * one.least, digits)} %"


def likely_text(one: Ranked) -> str:
    """The most likely change of the step time in percent, such as ``-8.1``; ``undecided`` if the change may also make
    steps slower."""
    return UNDECIDED if one.undecided else format.signed(-100 * one.likely, 1)
