"""Publishes the detectors' alerts to the clients, the run's log and the notifier."""

import time
from collections.abc import Callable, Sequence
from typing import Literal

from agents.alerts.detection import Detection, all_detectors
from agents.alerts.finding import step_of
from agents.alerts.notify import Notifier
from agents.hub.telemetry.peer_faults import PeerFaults
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import ALERT, Alert, Event, Facts, clip
from agents.rundir.standard_streams import say

STALL = "stall"  # name of the alert for a run that is stuck
LONGEST_NAME = 64  # maximum length of a fact's name


class Alerts:
    """Runs the detectors and publishes their alerts. The hub calls `check` about twice a second; the detectors run only
    if their CPU budget allows it.
    """

    def __init__(
        self,
        update_log: UpdateLog,
        peer_faults: PeerFaults,
        notifier: Notifier | None,
        explain_stall: Callable[[Sequence[int]], object] = lambda ranks: None,
    ) -> None:
        """`explain_stall` is called once for each stall, with the ranks listed in the stall alert."""
        self._explain_stall = explain_stall
        self._update_log, self._peer_faults, self._notifier = update_log, peer_faults, notifier
        self._detection = Detection(all_detectors())

    def learn(self, now_s: float) -> None:
        """Let the detectors learn typical values from the restored history, without raising alerts."""
        self._detection.learn(self._update_log.state, now_s)

    def check(self, now_s: float) -> None:
        """If it is time for the next check, decode the newest records, run the detectors, and publish alerts that have
        been raised, updated or ended."""
        if self._detection.is_due(now_s):
            self._detect(now_s)
        while self._detection.problems:
            self._log("error", clip(self._detection.problems.pop()))
        for problem in self._notifier.problems() if self._notifier else ():
            self._peer_faults.add("notify", problem)

    def _detect(self, now_s: float) -> None:
        began = time.thread_time()
        self._update_log.newest.read()
        spent_s = time.thread_time() - began
        active = set(self._update_log.state.alerts)
        for alert in self._detection.check(self._update_log.state, now_s, spent_s):
            if alert.active and (alert.name, alert.subject) in active:
                self._update_log.publish(alert)  # the alert was active before, so this is only an update
                continue
            self._announce(alert)
            level = alert.level if alert.active else "info"
            text = alert.text if alert.active else clip(f"over: {alert.text}")
            self._log(level, text, facts_of(alert))
            if alert.active and alert.name == STALL:
                self._explain_stall(alert.ranks)

    def run_failed(self, text: str) -> None:
        """Raise the alert `failed` when the run has ended with a failure. This method does not write to the run's log,
        which already has a line for the failure."""
        state = self._update_log.state
        self._announce(Alert("failed", "run", "error", True, step_of(state), time.time(), text))

    def close(self) -> None:
        """Send the queued alerts before this process ends; failures are written to stderr, because no client is
        connected any more.
        """
        for problem in self._notifier.close() if self._notifier else ():
            say(f"{problem}\n")

    def _log(self, level: Literal["info", "warning", "error"], text: str, facts: Facts | None = None) -> None:
        self._update_log.publish(Event(time.time(), level, "hub", text, facts or {}))

    def _announce(self, alert: Alert) -> None:
        """Publish an alert that has been raised or has ended, and send it to the notifier."""
        self._update_log.publish(alert)
        if self._notifier:
            self._notifier.notify(alert)


def facts_of(alert: Alert) -> Facts:
    """The facts (name-value pairs) of the log event that reports the start or the end of an alert. Both events name the
    alert and its subject, so that a reader can match them."""
    facts: Facts = {ALERT: alert.name, "subject": alert.subject, "active": alert.active, "step": alert.step}
    if alert.ranks:
        facts |= {"rank": alert.ranks[0], "ranks": len(alert.ranks)}
    evidence = {f"evidence.{name}": value for name, value in alert.evidence.items()}
    return facts | {name: value for name, value in evidence.items() if len(name) <= LONGEST_NAME}
