"""The rules of the autopilot: which changes the operator allows, and which events stop the autopilot. This module needs
no connection to a hub."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from agents.protocol import Board, Changes, KnobState, TrialState, Value, spell
from agents.state.run_state import RunState
from cockpit.data import format
from cockpit.knobs.advice import interval_text
from cockpit.knobs.edits import same
from cockpit.knobs.values import candidates, fit, parse, split_change, value_knobs
from engine.planner.advice import Candidate, Ranked

SAME_LOSS = 1.02  # maximum ratio of the mean loss after a change to that before it, for the change to be kept


@dataclass(frozen=True)
class Bounds:
    """The values that the operator allows for each knob: a range in `ranges` or a list in `values`."""

    ranges: Mapping[str, tuple[float, float]]
    values: Mapping[str, Sequence[Value]]

    @property
    def names(self) -> set[str]:
        return {*self.ranges, *self.values}

    def legal(self, knob: KnobState) -> list[Value]:
        """The values of `knob` that are legal and within the bounds. For a range, the result contains its two end
        points and a few round values in between, where they are legal."""
        found = [fit(knob, value) for value in self.values.get(knob.name, ())]
        if knob.name in self.ranges:
            low, high = self.ranges[knob.name]
            inside = (
                value for value in candidates(knob) if _number(value) and low <= float(str(value)) <= high
            )
            found += [*inside, fit(knob, low), fit(knob, high)]
        distinct = {spell(value): value for value in found if knob.legal.admits(value)}
        return list(distinct.values())

    def changes(self, board: Board | None) -> list[Changes]:
        """For each knob, one change to each value that `legal` returns, except the current value."""
        return [
            {knob.name: value}
            for knob in value_knobs(board)
            for value in self.legal(knob)
            if not same(value, knob.value)
        ]

    def pairs(self, board: Board | None) -> list[Changes]:
        """All changes that set two knobs at once."""
        both = combinations(self.changes(board), 2)
        return [one | other for one, other in both if one.keys().isdisjoint(other)]


def _number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def parse_bounds(words: Sequence[str]) -> Bounds:
    """Parse bounds such as ``knob=low..high`` or ``knob=value,value``. Raises ValueError, whose message is one
    sentence."""
    ranges: dict[str, tuple[float, float]] = {}
    values: dict[str, list[Value]] = {}
    for word in words:
        name, text = word.split("=", 1) if "=" in word else ("", "")
        if not name or not text:
            raise ValueError(f"{word} is not a bound; give knob=low..high or knob=value,value")
        if name in ranges or name in values:
            raise ValueError(f"{name} is given twice; name each knob once")
        low, dots, high = text.partition("..")
        if not dots:
            values[name] = [split_change(f"{name}={part}")[1] for part in text.split(",")]
            continue
        ends = [parse(low), parse(high)]
        numbers = [float(str(end)) for end in ends if _number(end)]
        if len(numbers) != 2 or numbers[0] > numbers[1]:
            raise ValueError(f"{word} is not a range of numbers; give knob=low..high, the lower number first")
        ranges[name] = numbers[0], numbers[1]
    return Bounds(ranges, values)


class Watch:
    """Detects events that the autopilot did not cause: lost ranks, alerts, and changes by other operators. Ignores
    ranks that were lost, and alerts that were raised, before the autopilot started.
    """

    def __init__(self, state: RunState) -> None:
        self._alerts = set(state.alerts)
        self._lost = {rank for rank, gone in state.gone.items() if not gone.clean}
        self._commands = set(state.commands)
        self._own: set[str] = set()

    def own(self, id: str) -> None:
        """Register the id of a request that the autopilot sent. The autopilot also regards requests whose ids start
        with `id` and a dot as its own.
        """
        self._own.add(id)

    def surprise(self, state: RunState) -> str:
        """A sentence about the first unexpected event, or "" if there is none."""
        for rank, gone in state.gone.items():
            if not gone.clean and rank not in self._lost:
                return f"rank {rank} is lost"
        for key, alert in state.alerts.items():
            if key not in self._alerts:
                return f"an alert was raised: {format.clean(alert.text)}"
        for id, command in state.commands.items():
            mine = any(id == own or id.startswith(f"{own}.") for own in self._own)
            if id not in self._commands and not mine:
                if command.state == "rejected":
                    continue
                return f"{format.clean(command.who) or 'someone'} made another change"
        return ""


def reason(ranked: Ranked, bottleneck: str) -> str:
    """The reason that the run's log gives for a trial: the bottleneck, the predicted gain, and how this gain was
    predicted."""
    return (
        f"autopilot: {bottleneck}; predicted gain {100 * ranked.likely:.1f} % "
        f"({100 * ranked.least:.1f} % to {100 * ranked.most:.1f} %), {ranked.candidate.source}"
    )


def nothing_left(gain: float, undecided: Sequence[Ranked]) -> str:
    """Why the autopilot tries no further change. `undecided`: changes whose likely gain is at least `gain` percent,
    but that may also make steps slower or have no effect."""
    why = f"no change within the bounds is predicted to gain {gain:g} %"
    if undecided:
        each = ", ".join(f"{one.candidate.words} (step time {interval_text(one)})" for one in undecided)
        why += f"; undecided, so tried only with --undecided: {each}"
    return why


def loss_kept(trial: TrialState) -> bool:
    """Whether the mean loss increased by at most 2 % in a trial. False if the loss before or after the change is
    unknown or NaN."""
    if not (trial.loss_before and trial.loss_after):
        return False
    return trial.loss_after <= SAME_LOSS * trial.loss_before


def outside(trial: TrialState, predicted: Candidate) -> str:
    """A sentence if the measured 95 % interval of a trial does not overlap the predicted interval, else ""."""
    if trial.low is None or trial.high is None or predicted.after_ms is None or not predicted.now_ms:
        return ""
    low, high = (after / predicted.now_ms for after in predicted.after_ms)
    if trial.high < low or trial.low > high:
        changes = ", ".join(f"{name}={spell(value)}" for name, value in trial.changes.items())
        ends = (format.excess(ratio - 1, 1) for ratio in (trial.low, trial.high, low, high))
        return "{} changed the step time by {} to {}, outside the predicted {} to {}".format(changes, *ends)
    return ""
