"""Pure functions for the rules of trials: which knobs can be tried, and which measured changes are kept."""

from collections.abc import Sequence

from msgspec import structs

from agents.hub.commands.confidence import compared, typical
from agents.hub.commands.trial_window import Measured
from agents.protocol import Board, KnobState, TrialState, Try
from agents.recording.commands import TrialEntry


def check_request(
    ask: Try, board: Board | None, under_way: TrialState | None, journal_failure: str
) -> tuple[KnobState | None, str]:
    """The knob to try, and a refusal ("" if the knob can be tried)."""
    if journal_failure:
        return None, journal_failure
    if under_way:
        return None, f"another trial is running, by {under_way.who or 'someone'}"
    if board is None:
        return None, "no rank has sent its knobs yet; try again when the run has started"
    if len(ask.changes) != 1:
        return None, "a trial changes one knob"
    (name, value), knobs = next(iter(ask.changes.items())), {knob.name: knob for knob in board.knobs}
    knob = knobs.get(name)
    if knob is None:
        return None, f"there is no knob {name}; the knobs are {', '.join(knobs)}"
    if knob.action:
        return None, f"{name} is an action; only a knob can be tried"
    if knob.legal.form:
        return None, f"{name} cannot be tried, because changing it restarts all ranks"
    if knob.value == value:
        return knob, f"{name} already has this value"
    return knob, knob.refusal(value) or ""


def judged(entry: TrialEntry, window: Sequence[Measured]) -> tuple[TrialEntry, str]:
    """The trial with the measured comparison, and why the value must be reverted ("" if it is kept)."""
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
    if not state.loss_neutral:
        return entry, "it changes the loss, so a faster step alone does not justify it"
    if found.high >= 1.0:
        return entry, "it is not clearly faster"
    return entry, ""


def mean_loss(window: Sequence[Measured]) -> float | None:
    """The mean of the known losses; None if no loss is known."""
    losses = [step.loss for step in window if step.loss is not None]
    return sum(losses) / len(losses) if losses else None
