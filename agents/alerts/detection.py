"""From findings to alerts: with hysteresis, and within a budget of the hub's time."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agents.alerts.devices import Memory, Throttle
from agents.alerts.finding import RANKS_NAMED, Detector, Finding, step_of
from agents.alerts.ranks import Lost, Stall
from agents.alerts.stragglers import Slowdown, Straggler
from agents.alerts.training import DeadExperts, Loss, Routing
from agents.protocol import Alert, clip
from agents.state.run_state import RunState

SHARE = 0.02  # of the hub's time at most, on average
TELL_ANEW_S = 10.0  # an alert whose words have changed


def all_detectors() -> list[Detector]:
    return [Lost(), Stall(), Straggler(), Slowdown(), Loss(), DeadExperts(), Routing(), Memory(), Throttle()]


@dataclass
class _Known:
    finding: Finding
    seen: int = 0  # looks running in which it was there
    missed: int = 0  # looks running in which it was not
    told: Finding | None = None  # as last told; None: it is no alert yet
    told_s: float = 0.0


class Detection:
    """Every detector over one run. `look` is called at each tick, and looks when it can afford to."""

    def __init__(self, detectors: Sequence[Detector], cpu_s: Callable[[], float] = time.thread_time) -> None:
        self._detectors = list(detectors)
        self._known: list[dict[tuple[str, str], _Known]] = [{} for _ in detectors]
        self._cpu_s = cpu_s
        self._next_s = 0.0
        self.problems: list[str] = []  # detectors that failed and are left out; for the hub to tell and clear

    def acquaint(self, state: RunState, now_s: float) -> None:
        """What the state holds by now is old: detectors may learn from it what is usual, and find nothing."""
        for detector in self._detectors:
            with contextlib.suppress(Exception):  # it will fail again when it looks, and that is told
                detector.look(state, now_s)

    def due(self, now_s: float) -> bool:
        """Whether it can afford to look now."""
        return now_s >= self._next_s

    def look(self, state: RunState, now_s: float) -> list[Alert]:
        """Alerts that are raised, told anew or ended now."""
        if not self.due(now_s):
            return []
        began = self._cpu_s()
        alerts = []
        for detector, known in list(zip(self._detectors, self._known, strict=True)):
            try:
                alerts += _judge(detector, known, state, now_s)
            except Exception as error:  # noqa: BLE001 - a detector that errs must not end the hub
                place = self._detectors.index(detector)
                del self._detectors[place], self._known[place]
                self.problems.append(
                    f"the detector {type(detector).__name__} failed and is left out: {error!r}"
                )
        self._next_s = now_s + (self._cpu_s() - began) / SHARE
        return alerts


def _judge(
    detector: Detector, known: dict[tuple[str, str], _Known], state: RunState, now_s: float
) -> list[Alert]:
    findings = detector.look(state, now_s)
    if findings is None:
        return []
    alerts = []
    found = {(finding.name, finding.subject): finding for finding in findings}
    for key, finding in found.items():
        one = known.setdefault(key, _Known(finding))
        one.finding, one.seen, one.missed = finding, one.seen + 1, 0
        raised = one.told is None and one.seen >= detector.holds
        anew = one.told is not None and one.told != finding and now_s - one.told_s >= TELL_ANEW_S
        if raised or anew:
            one.told, one.told_s = finding, now_s
            alerts.append(_alert(finding, state, active=True))
    for key in [key for key in known if key not in found]:
        one = known[key]
        one.seen, one.missed = 0, one.missed + 1
        if one.told is None or one.missed >= detector.releases:
            del known[key]
            if one.told:
                alerts.append(_alert(one.told, state, active=False))
    return alerts


def _alert(finding: Finding, state: RunState, active: bool) -> Alert:
    return Alert(
        finding.name,
        finding.subject,
        finding.level,
        active,
        step_of(state),
        time.time(),
        clip(finding.text),
        finding.evidence,
        list(finding.ranks[:RANKS_NAMED]),
    )
