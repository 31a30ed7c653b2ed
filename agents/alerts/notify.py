"""Sends alerts from the hub to the standard input of a command, or to a URL by HTTP POST, as JSON or in the format of
Slack's incoming webhooks."""

import contextlib
import queue
import subprocess
import threading
import time
import urllib.parse
import urllib.request

import msgspec

from agents.protocol import Alert
from agents.rundir.alert_target import alert_target

WAITING = 64  # maximum length of the queue; further alerts are not sent, but the log has all alerts
COMMAND_S = 10.0
POST_S = 5.0
FLUSH_S = 4.0  # maximum time to send queued alerts when the hub ends


def slack_message(run: str, alert: Alert) -> dict[str, str]:
    """The JSON body for a Slack incoming webhook: one message, in which the characters of Slack's markup are escaped
    (https://docs.slack.dev/messaging/formatting-message-text).
    """
    state = alert.level if alert.active else "ended"
    text = f"{state} · {run} · step {alert.step} · {alert.text}"
    for character, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(character, escaped)
    return {"text": text}


class Notifier:
    """Sends alerts to `target` in its own thread, so that the hub never waits.

    Raises RunError if `target` is invalid (see `alert_target`).
    """

    def __init__(self, run: str, target: str) -> None:
        self._run = run
        self._target, self._post, self._slack, self._shown = alert_target(target)
        self._alerts: queue.Queue[Alert | None] = queue.Queue(WAITING)  # None ends the thread
        self._problems: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="notifier", daemon=True)
        self._thread.start()

    def notify(self, alert: Alert) -> None:
        with contextlib.suppress(queue.Full):
            self._alerts.put_nowait(alert)

    def problems(self) -> list[str]:
        """A one-sentence message for each delivery that failed since the last call."""
        failures = []
        while not self._problems.empty():
            failures.append(self._problems.get())
        return failures

    def close(self, within_s: float = FLUSH_S) -> list[str]:
        """Send the queued alerts, for at most `within_s` seconds. Returns a message for each delivery that has failed
        since the last call of `problems`, and one more if some alerts are still unsent after `within_s` seconds.
        """
        until = time.monotonic() + within_s
        with contextlib.suppress(queue.Full):
            self._alerts.put(None, timeout=within_s)
        self._thread.join(max(0.0, until - time.monotonic()))
        late = [f"{self._shown} did not receive the last alerts within {within_s:g} s"]
        return self.problems() + (late if self._thread.is_alive() else [])

    def _work(self) -> None:
        while alert := self._alerts.get():
            try:
                self._deliver(self._body(alert))
            except Exception as error:  # noqa: BLE001 - one failed delivery must not stop the next
                self._problems.put(f"{self._shown} did not receive an alert: {type(error).__name__}")

    def _body(self, alert: Alert) -> bytes:
        if self._slack:
            return msgspec.json.encode(slack_message(self._run, alert))
        fields = {name: getattr(alert, name) for name in alert.__struct_fields__}
        return msgspec.json.encode({"run": self._run, **fields})

    def _deliver(self, body: bytes) -> None:
        if self._post:
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(self._target[0], data=body, headers=headers)
            urllib.request.urlopen(request, timeout=POST_S).close()
        else:
            subprocess.run(
                self._target,
                input=body,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=COMMAND_S,
                check=True,
            )
