"""Turns findings into alerts, with hysteresis, within a CPU budget."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agents.alerts.devices import Memory, Throttle
from agents.alerts.finding import RANKS_NAMED, Detector, Finding, step_of
from agents.alerts.ranks import Absent, Lost, Stall
from agents.alerts.stragglers import Slowdown, Straggler
from agents.alerts.training import DeadExperts, Loss, Routing
from agents.protocol import Alert, clip
from agents.state.run_state import RunState

# Maximum average share of the hub's time, with the decoding of the records that the detectors read.
CPU_SHARE = 0.02
REPUBLISH_S = 10.0  # minimum interval between two updates of an active alert


def all_detectors() -> list[Detector]:
    return [
        Lost(),
        Absent(),
        Stall(),
        Straggler(),
        Slowdown(),
        Loss(),
        DeadExperts(),
        Routing(),
        Memory(),
        Throttle(),
    ]


@dataclass
class _Tracked:
    finding: Finding
    found_in: int = 0  # number of consecutive checks that returned the finding
    missing_in: int = 0  # number of consecutive checks that did not return it
    published: Finding | None = None  # last published version; None: not an alert yet
    published_s: float = 0.0
    began_step: int | None = None
    raised_s: float | None = None  # Unix time


class Detection:
    """Runs every detector for one run. The hub calls `check` at each tick of its timer; `check` does nothing while the
    CPU budget is exceeded.
    """

    def __init__(self, detectors: Sequence[Detector], cpu_s: Callable[[], float] = time.thread_time) -> None:
        self._detectors = list(detectors)
        self._tracked: list[dict[tuple[str, str], _Tracked]] = [{} for _ in detectors]
        self._cpu_s = cpu_s
        self._next_s = 0.0
        # Names of detectors that failed and are disabled; the hub logs and removes these entries.
        self.problems: list[str] = []

    def learn(self, state: RunState, now_s: float) -> None:
        """Let the detectors learn typical values from restored history; findings in the history are ignored."""
        for detector in self._detectors:
            # An error is not reported here: the detector fails again in `check`, which reports the failure.
            with contextlib.suppress(Exception):
                detector.check(state, now_s)

    def is_due(self, now_s: float) -> bool:
        """Whether the CPU budget allows a check now."""
        return now_s >= self._next_s

    def check(self, state: RunState, now_s: float, spent_s: float = 0.0) -> list[Alert]:
        """Run the detectors; returns the alerts to raise, update or end. `spent_s`: CPU time that the caller has spent
        on decoding `state` for this check."""
        if not self.is_due(now_s):
            return []
        began = self._cpu_s()
        alerts = []
        for detector, known in list(zip(self._detectors, self._tracked, strict=True)):
            try:
                alerts += _judge(detector, known, state, now_s)
            except Exception as error:  # noqa: BLE001 - a failing detector must not end the hub
                place = self._detectors.index(detector)
                del self._detectors[place], self._tracked[place]
                self.problems.append(
                    f"the detector {type(detector).__name__} failed and is disabled: {error!r}"
                )
        self._next_s = now_s + (self._cpu_s() - began + spent_s) / CPU_SHARE
        return alerts


def _judge(
    detector: Detector, known: dict[tuple[str, str], _Tracked], state: RunState, now_s: float
) -> list[Alert]:
    findings = detector.check(state, now_s)
    if findings is None:
        return []
    alerts = []
    found = {(finding.name, finding.subject): finding for finding in findings}
    for key, finding in found.items():
        one = known.setdefault(key, _Tracked(finding))
        one.finding, one.found_in, one.missing_in = finding, one.found_in + 1, 0
        if one.found_in == 1 and one.published is None:
            one.began_step = step_of(state) if finding.began is None else finding.began
        raised = one.published is None and one.found_in >= detector.holds
        anew = (
            one.published is not None and one.published != finding and now_s - one.published_s >= REPUBLISH_S
        )
        if raised or anew:
            one.published, one.published_s = finding, now_s
            if raised:
                one.raised_s = time.time()
            alerts.append(_alert(one, finding, state, active=True))
    for key in [key for key in known if key not in found]:
        one = known[key]
        one.found_in, one.missing_in = 0, one.missing_in + 1
        if one.published is None or one.missing_in >= detector.releases:
            del known[key]
            if one.published:
                alerts.append(_alert(one, one.published, state, active=False))
    return alerts


def _alert(tracked: _Tracked, finding: Finding, state: RunState, active: bool) -> Alert:
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
        tracked.began_step,
        tracked.raised_s,
    )
