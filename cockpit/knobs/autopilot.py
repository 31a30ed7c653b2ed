"""The autopilot's rules: the changes that an operator allows, and the events that stop it. Needs no connection."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agents.protocol import Changes, TrialState, Value, spell
from agents.state.run_state import RunState
from cockpit.data import format
from cockpit.knobs.edits import same
from cockpit.knobs.values import parse, split_change
from engine.planner.advice import Candidate, Ranked


@dataclass(frozen=True)
class Bounds:
    """Values that the operator allows for each knob: a range in `ranges` or a list in `values`."""

    ranges: Mapping[str, tuple[float, float]]
    values: Mapping[str, Sequence[Value]]

    @property
    def names(self) -> set[str]:
        return {*self.ranges, *self.values}

    def allow(self, changes: Changes) -> bool:
        """Whether every change is within the bounds."""
        return all(self._allows(name, value) for name, value in changes.items())

    def _allows(self, name: str, value: Value) -> bool:
        if any(same(value, one) for one in self.values.get(name, ())):
            return True
        number = isinstance(value, int | float) and not isinstance(value, bool)
        low, high = self.ranges.get(name, (1.0, 0.0))
        return number and low <= float(str(value)) <= high


def parse_bounds(words: Sequence[str]) -> Bounds:
    """Parse bounds such as ``knob=low..high`` or ``knob=value,value``. Raises ValueError with one sentence."""
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
        numbers = [float(end) for end in ends if isinstance(end, int | float) and not isinstance(end, bool)]
        if len(numbers) != 2 or numbers[0] > numbers[1]:
            raise ValueError(f"{word} is not a range of numbers; give knob=low..high, the lower number first")
        ranges[name] = numbers[0], numbers[1]
    return Bounds(ranges, values)


class Watch:
    """Detects events that the autopilot does not expect. Alerts and lost ranks from before the start of the autopilot
    are ignored.
    """

    def __init__(self, state: RunState) -> None:
        self._alerts = set(state.alerts)
        self._lost = {rank for rank, gone in state.gone.items() if not gone.clean}
        self._commands = set(state.commands)
        self._own: set[str] = set()

    def own(self, id: str) -> None:
        """Register `id` as a request of the autopilot. Requests whose id begins with `id.` also belong to the
        autopilot.
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
    """The reason for a trial, for the run's log: bottleneck, predicted gain and source."""
    return (
        f"autopilot: {bottleneck}; predicted gain {ranked.likely:.1%} ({ranked.least:.1%} to {ranked.most:.1%}), "
        f"{ranked.candidate.source}"
    )


def outside(trial: TrialState, predicted: Candidate) -> str:
    """A sentence if the 95 % interval that a trial measured lies outside the predicted interval, else ""."""
    if trial.low is None or trial.high is None or predicted.after_ms is None or not predicted.now_ms:
        return ""
    low, high = (after / predicted.now_ms for after in predicted.after_ms)
    if trial.high < low or trial.low > high:
        return (
            f"{', '.join(f'{name}={spell(value)}' for name, value in trial.changes.items())} changed the step time by "
            f"{trial.low - 1:+.1%} to {trial.high - 1:+.1%}, outside the predicted {low - 1:+.1%} to {high - 1:+.1%}"
        )
    return ""
