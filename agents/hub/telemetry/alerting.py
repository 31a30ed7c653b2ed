"""A hub's alerts: what the detectors find, told to watchers, in the log and outside."""

import sys
import time
from collections.abc import Callable
from typing import Literal

from agents.alerts.detection import Detection, all_detectors
from agents.alerts.finding import step_of
from agents.alerts.notify import Notifier
from agents.hub.telemetry.peer_faults import PeerFaults
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import Alert, clip

Log = Callable[[Literal["info", "warning", "error"], str], None]


class Alerts:
    """`check` is called at each tick; it looks when it can afford to."""

    def __init__(
        self, update_log: UpdateLog, peer_faults: PeerFaults, notifier: Notifier | None, log: Log
    ) -> None:
        self._update_log, self._peer_faults, self._notifier, self._log = (
            update_log,
            peer_faults,
            notifier,
            log,
        )
        self._detection = Detection(all_detectors())

    def learn(self, now_s: float) -> None:
        """What is known by now is old: it says what is usual, and is no news."""
        self._detection.learn(self._update_log.state, now_s)

    def is_due(self, now_s: float) -> bool:
        return self._detection.is_due(now_s)

    def check(self, now_s: float) -> None:
        """See whether something is wrong with the run, and tell whoever wants to know."""
        active = set(self._update_log.state.alerts)
        for alert in self._detection.check(self._update_log.state, now_s):
            if alert.active and (alert.name, alert.subject) in active:
                self._update_log.publish(alert)  # told anew
                continue
            self._announce(alert)
            level = alert.level if alert.active else "info"
            self._log(level, alert.text if alert.active else clip(f"over: {alert.text}"))
        while self._detection.problems:
            self._log("error", clip(self._detection.problems.pop()))
        for problem in self._notifier.problems() if self._notifier else ():
            self._peer_faults.add("notify", problem)

    def run_failed(self, text: str) -> None:
        """The run is over and did not end well; the log has its own line of that."""
        state = self._update_log.state
        self._announce(Alert("failed", "run", "error", True, step_of(state), time.time(), text))

    def close(self) -> None:
        """The last alerts go out before this process ends; nobody watches any more, so what fails is for the log."""
        for problem in self._notifier.close() if self._notifier else ():
            sys.stderr.write(f"{problem}\n")

    def _announce(self, alert: Alert) -> None:
        """Tell of an alert that is new or over, here and outside."""
        self._update_log.publish(alert)
        if self._notifier:
            self._notifier.notify(alert)
