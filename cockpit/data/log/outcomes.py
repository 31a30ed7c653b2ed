"""Outcomes of proposals and trials in one line, and the effect of an applied change."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from agents.protocol import CommandState, Summary, TrialState
from agents.state.preview_checks import MARK, checks_of
from agents.state.run_state import RunState
from cockpit.data import format
from cockpit.data.quantities import NumberFormat, label_and_format, share


def changes_text(command: CommandState) -> str:
    """The changes of a command as text, such as ``micro_batches 4→8, recompute none→full``."""
    if not command.changes:
        return "undo"  # the hub found nothing to undo
    return ", ".join(
        f"{format.clean(name)} {format.change(command.before[name], after)}"
        if name in command.before
        else f"{format.clean(name)}={format.knob(after)}"
        for name, after in command.changes.items()
    )


def reverted_text(command: CommandState) -> str:
    """The changes that an undo of `command` makes, as text such as ``micro_batches 8→4``."""
    return ", ".join(
        f"{format.clean(name)} {format.change(command.changes.get(name), value)}"
        for name, value in command.before.items()
    )


def command_text(command: CommandState) -> str:
    """A proposal in one line: its changes, its state, its revision, and the reasons given by the hub and the
    operator."""
    text = f"{changes_text(command)} · {command.state}"
    if command.state == "applied":
        text += f" {command.acks}/{command.world} at step {format.grouped(command.applied_step)}"
    if command.revision:
        text += f" · revision {command.revision}"
    if command.undoes:
        text += f", which reverts {command.undoes}"
    text += f" · {format.clean(command.why)}" if command.why else ""
    return f"{text} · “{format.clean(command.reason)}”" if command.reason else text


def trial_changes(trial: TrialState) -> str:
    """The changes of a trial as text, such as ``micro_batches 4→8``."""
    return ", ".join(
        f"{format.clean(name)} {format.change(trial.before.get(name), value)}"
        for name, value in trial.changes.items()
    )


def trial_progress(trial: TrialState) -> str:
    """The progress of a trial, such as ``after 12/30``, while the trial is measuring; otherwise its state."""
    if trial.state in ("before", "after"):
        return f"{trial.state} {trial.measured}/{trial.steps}"
    return trial.state


def ratio_text(trial: TrialState) -> str:
    """The relative change in step time, such as ``-8.3 % (95 %: -10.1 % to -6.2 %)``; "" if the trial has no
    comparison."""
    if trial.ratio is None or trial.low is None or trial.high is None:
        return ""
    measured, low, high = (format.excess(ratio - 1, 1) for ratio in (trial.ratio, trial.low, trial.high))
    return f"{measured} (95 %: {low} to {high})"


def trial_text(trial: TrialState) -> str:
    """The state of a trial, in one line."""
    text = f"trial {trial_changes(trial)} · {trial.state}"
    if ratio := ratio_text(trial):
        text += f" · step time {ratio} over {format.counted(trial.steps, 'step')}"
    elif not trial.settled:
        text += f" · {trial.measured}/{format.counted(trial.steps, 'step')}"
    return f"{text} · {format.clean(trial.why)}" if trial.why else text


# ------------------------------------------------------------------------------------ the effect of a change

WINDOW = 32  # maximum number of steps whose median is taken, before a change and after it
SETTLING = 2  # steps after a change that are left out, because caches and allocators are still cold
FEWEST = 4


@dataclass(frozen=True)
class Brought:
    """The effect of an applied change on one quantity: the values measured before and after the change and, if a
    preview of the change was compared with them, the predicted interval.
    """

    quantity: str  # a name with its unit, as in `agents.protocol.Estimate`
    before: float
    after: float
    source: str  # how it was measured
    low: float | None = None
    high: float | None = None

    @property
    def inside(self) -> bool | None:
        """Whether the measured value lies in the predicted interval; None without a prediction."""
        return None if self.low is None or self.high is None else self.low <= self.after <= self.high


def brought(state: RunState, command: CommandState) -> list[Brought]:
    """The measured effect of an applied change: the values with which its preview was compared or, if it was not
    compared, the median step time before and after the change. Empty if the change is not applied, or if fewer than
    `FEWEST` steps were measured before or after it.
    """
    if command.state != "applied" or command.applied_step is None:
        return []
    for event in reversed(state.events):
        if event.facts.get(MARK) and event.facts.get("revision") == command.revision:
            return [
                Brought(one.quantity, one.now, one.measured, "checked preview", one.low, one.high)
                for one in checks_of(event)
            ]
    return _median_times(state.summaries, command.revision, command.applied_step)


def _median_times(summaries: Sequence[Summary], revision: int, applied: int) -> list[Brought]:
    at = bisect_left(summaries, applied, key=lambda summary: summary.step)
    earlier = summaries[max(0, at - WINDOW) : at]
    before = [one.step_ms for one in earlier if one.revision == earlier[-1].revision]
    later = summaries[at + SETTLING : at + SETTLING + WINDOW]
    after = [one.step_ms for one in later if one.revision == revision]
    if min(len(before), len(after)) < FEWEST:
        return []
    source = f"medians of {len(before)} and {len(after)} steps"
    return [Brought("step_ms", median(before), median(after), source)]


def brought_text(one: Brought) -> str:
    """The effect of a change on one quantity, as text such as ``step time 655 → 612 ms (-6.6 %), predicted 598 .. 630
    ms: inside``."""
    name, written = label_and_format(one.quantity)
    text = f"{name} {_between(one.before, one.after, written, ' → ')}"
    if written is share:
        text += f" ({format.signed(100 * (one.after - one.before), 1)} pt)"
    elif one.before > 0:
        text += f" ({format.excess(one.after / one.before - 1, 1)})"
    if one.low is not None and one.high is not None:
        predicted = _between(one.low, one.high, written, " .. ")
        text += f", predicted {predicted}: {'inside' if one.inside else 'outside'}"
    return text


def _between(first: float, second: float, written: NumberFormat, sign: str) -> str:
    """Two values of one quantity as text, with a common unit written only once, as in ``655 → 612 ms``."""
    (one, unit), (other, other_unit) = written(first), written(second)
    return f"{one}{'' if unit == other_unit else f' {unit}'}{sign}{other} {other_unit}".rstrip()
