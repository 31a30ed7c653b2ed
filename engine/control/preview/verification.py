"""Compares previews of applied changes with the steps that follow, and records the errors of the predictions."""

import time
from collections.abc import Mapping, Sequence
from math import log
from statistics import fmean

from agents.protocol import Estimate, Event, Value
from agents.state.preview_checks import Check, check_event

SETTLING = 2  # steps after a change that are ignored
CHECKED_STEPS = 10
FEWEST_STEPS = 4  # minimum number of measured steps for a check
TOLERANCE = 0.02  # relative tolerance of a prediction without an interval, because steps vary a little
PRIOR_ERROR, PRIOR_WEIGHT = 0.5, 3.0  # assumed relative error, and the number of checks that it counts as
LEAST_ERROR, MOST_ERROR = 0.1, 3.0
# Relative change of the prior checks. Checks of large changes have more weight than others.
USUAL_CHANGE = 0.2


class Verification:
    """Checks one change at a time; the next change ends the check of the previous one."""

    def __init__(self) -> None:
        self._estimates: Sequence[Estimate] = ()
        self._changes: dict[str, tuple[Value, Value]] = {}
        self._revision = 0
        self._steps = 0
        self._measured: dict[str, list[float]] = {}
        self._checked: dict[str, list[tuple[float, float]]] = {}
        """By quantity, the logarithms of predicted ratios, and of measured to predicted values."""
        self.events: list[Event] = []  # events that have not been sent yet

    def begin(
        self, revision: int, changes: dict[str, tuple[Value, Value]], estimates: Sequence[Estimate]
    ) -> None:
        """Begin to compare the preview of an applied change with the steps that follow. `estimates` are predictions
        that were computed from the steps before the change."""
        self._end()
        self._revision, self._changes = revision, changes
        self._estimates = [one for one in estimates if _checkable(one)]
        self._steps, self._measured = 0, {}

    def note(self, quantities: Mapping[str, float | None]) -> None:
        """Record the measured values of one training step after the change that is being checked. The first `SETTLING`
        steps are ignored, and the check ends after `CHECKED_STEPS` more."""
        if not self._estimates:
            return
        self._steps += 1
        if self._steps <= SETTLING:
            return
        for name, value in quantities.items():
            if value is not None:
                self._measured.setdefault(name, []).append(value)
        if self._steps == SETTLING + CHECKED_STEPS:
            self._end()

    def error_of_change(self, quantity: str) -> float:
        """Relative standard error of the predicted changes of `quantity`, estimated from an assumed error
        (`PRIOR_ERROR`) and from the errors of earlier previews of this run."""
        checked = self._checked.get(quantity, [])
        weight = PRIOR_WEIGHT * USUAL_CHANGE**2
        squares = weight * PRIOR_ERROR**2 + sum(miss**2 for _, miss in checked)
        found = float((squares / (weight + sum(change**2 for change, _ in checked))) ** 0.5)
        return min(MOST_ERROR, max(LEAST_ERROR, found))

    def _end(self) -> None:
        estimates, self._estimates = self._estimates, ()
        checks = []
        for one in estimates:
            measured = self._measured.get(one.quantity, [])
            if len(measured) >= FEWEST_STEPS:
                checks.append(_check(one, fmean(measured)))
        for check in checks:
            if min(check.now, check.likely, check.measured) > 0:
                change, miss = log(check.likely / check.now), log(check.measured / check.likely)
                self._checked.setdefault(check.quantity, []).append((change, miss))
        if checks:
            self.events.append(check_event(time.time(), self._revision, self._changes, checks))


def _checkable(one: Estimate) -> bool:
    """Whether an estimate can be checked: the value before the change must be known, and the estimate must be an
    interval or differ from that value."""
    if one.now is None or not one.known:
        return False
    return one.interval is not None or one.after != one.now


def _check(one: Estimate, measured: float) -> Check:
    assert one.now is not None
    if one.interval is not None:
        low, high = one.interval
        slack = TOLERANCE * abs(one.after or 0.0) if low == high else 0.0
    else:
        assert one.after is not None
        low = high = one.after
        slack = TOLERANCE * abs(one.after)
    likely = one.after if one.after is not None else (low + high) / 2
    return Check(one.quantity, one.now, likely, low - slack, high + slack, measured)
