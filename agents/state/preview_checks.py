"""Compares previews with later measurements, with one check for each quantity that a change was predicted to affect.

The leader rank checks each applied change after some steps and sends the result as an event, with the numbers in its
`facts`. So the results appear in the run's log, in its recording and in replays, and survive a restart of the hub.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from agents.protocol import Event, Value, clip, spell

MARK = "preview_checks"
"""Fact of an event with checks: the number of checks."""

FIELDS = ("now", "likely", "low", "high", "measured")


@dataclass(frozen=True)
class Check:
    """A previewed quantity, compared with the value that was measured after the change was applied. `now`: the value
    before the change; `likely`, `low`, `high`: the predicted values; `measured`: the value after the change.
    """

    quantity: str
    now: float
    likely: float
    low: float
    high: float
    measured: float

    @property
    def inside(self) -> bool:
        """Whether the measured value lies in the predicted interval."""
        return self.low <= self.measured <= self.high

    @property
    def error(self) -> float:
        """Relative error of the predicted value `likely`; 0 if the measured value is 0."""
        return abs(self.measured - self.likely) / abs(self.measured) if self.measured else 0.0


@dataclass(frozen=True)
class Trust:
    """How far to trust the previews of a quantity: the number of checks, the number of checks whose measured value was
    inside the predicted interval, and the mean relative error.
    """

    checks: int
    hits: int
    mean_error: float


def check_event(
    time_s: float, revision: int, changes: Mapping[str, tuple[Value, Value]], checks: list[Check]
) -> Event:
    """The event that reports how the previews of a change compare with later measurements. `changes`: the old and new
    value of each knob."""
    facts: dict[str, Value] = {MARK: len(checks), "revision": revision}
    for check in checks:
        facts |= {f"{check.quantity}.{field}": getattr(check, field) for field in FIELDS}
    what = ", ".join(f"{name} {spell(old)}→{spell(new)}" for name, (old, new) in changes.items())
    found = ", ".join(
        f"{check.quantity} {check.measured:.4g} {'in' if check.inside else 'NOT in'} "
        f"{check.low:.4g} .. {check.high:.4g}"
        for check in checks
    )
    return Event(time_s, "info", "preview", clip(f"preview of {what} checked: {found}"), facts)


def checks_of(event: Event) -> list[Check]:
    """The comparisons of previewed with measured values that an event contains; empty if the event is of another kind
    or is incomplete."""
    if MARK not in event.facts:
        return []
    names = [name.removesuffix(".measured") for name in event.facts if name.endswith(".measured")]
    found = []
    for name in names:
        numbers = [event.facts.get(f"{name}.{field}") for field in FIELDS]
        reals = [float(one) for one in numbers if isinstance(one, int | float)]
        if len(reals) == len(FIELDS):
            found.append(Check(name, *reals))
    return found


def trust(events: Iterable[Event]) -> dict[str, Trust]:
    """For each previewed quantity, how accurate its previews were in this run: the number of checks in the run's log,
    how many measured values were inside the predicted interval, and the mean relative error."""
    checks: dict[str, list[Check]] = {}
    for event in events:
        for check in checks_of(event):
            checks.setdefault(check.quantity, []).append(check)
    return {
        quantity: Trust(len(own), sum(one.inside for one in own), sum(one.error for one in own) / len(own))
        for quantity, own in checks.items()
    }
