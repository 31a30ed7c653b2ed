"""Pure functions for the rules of trials: which knobs can be tried, and which measured changes are kept."""

import math
from collections.abc import Mapping, Sequence

from msgspec import structs

from agents.hub.commands.confidence import compared, typical
from agents.hub.commands.trial_window import Measured
from agents.protocol import Board, KnobState, TrialState, Try, Value
from agents.recording.commands import TrialEntry


def check_request(
    ask: Try, board: Board | None, under_way: TrialState | None, journal_failure: str
) -> tuple[list[KnobState], str]:
    """Returns the knobs that the trial would change, and the reason for refusing the trial ("" if it is accepted)."""
    if journal_failure:
        return [], journal_failure
    if under_way:
        return [], f"another trial is running, by {under_way.who or 'someone'}"
    if board is None:
        return [], "no rank has sent its knobs yet; try again when the run has started"
    if not ask.changes:
        return [], "a trial changes at least one knob"
    knobs = {knob.name: knob for knob in board.knobs}
    refusals = (_refusal(name, value, knobs) for name, value in ask.changes.items())
    tried = [knobs[name] for name in ask.changes if name in knobs]
    return tried, next(filter(None, refusals), "")


def _refusal(name: str, value: Value, knobs: Mapping[str, KnobState]) -> str:
    """Why the knob `name` cannot be tried with this value; "" if it can."""
    knob = knobs.get(name)
    if knob is None:
        return f"there is no knob {name}; the knobs are {', '.join(knobs)}"
    if knob.action:
        return f"{name} is an action; only a knob can be tried"
    if knob.legal.form:
        return f"{name} cannot be tried, because changing it restarts all ranks"
    if knob.value == value:
        return f"{name} already has this value"
    return knob.refusal(value) or ""


def judged(entry: TrialEntry, window: Sequence[Measured]) -> tuple[TrialEntry, str]:
    """The trial, updated with the comparison of the step times before and after its change, and the reason to revert
    its values ("" if they are kept)."""
    times = [step.step_ms for step in window]
    found = compared(entry.times, times)
    state = structs.replace(
        entry.state,
        measured=len(window),
        after_ms=typical(times),
        loss_after=mean_loss(window),
        ratio=found.ratio if found else None,
        low=found.low if found else None,
        high=found.high if found else None,
    )
    entry = structs.replace(entry, state=state)
    if found is None:
        return entry, "the measured step times cannot be compared"
    if state.loss_after is not None and not math.isfinite(state.loss_after):
        return entry, "the loss is not finite"
    if not state.loss_neutral:
        return entry, "it changes the loss, so a faster step alone does not justify it"
    if found.high >= 1.0:
        return entry, "it is not clearly faster"
    return entry, ""


def mean_loss(window: Sequence[Measured]) -> float | None:
    """The mean loss of the steps whose loss is known; None if there are no such steps."""
    losses = [step.loss for step in window if step.loss is not None]
    return sum(losses) / len(losses) if losses else None
