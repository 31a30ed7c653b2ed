"""Alerts of a real hub appear in the state of the run and in its log, and reach the notification command."""

import json
import math
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from msgspec import structs

from agents.alerts.notify import Notifier, slack_message
from agents.client import Client
from agents.protocol import Alert, Event
from agents.rundir.hub_supervisor import ON_ALERT, _environ_of_hub
from agents.rundir.runs import RunError
from tests.unit.agents.conftest import Opened
from tests.unit.agents.fleet import Fleet, HubProcess, make_summary, poll_until

ALERT = Alert("stall", "run", "error", True, 7, 1.0, "the run is stuck", {"limit_s": 10.0}, [3])


def test_a_broken_loss_raises_and_ends_an_alert_everywhere(
    own_hub: HubProcess, opened: Opened, tmp_path: Path
) -> None:
    own_hub.kill()
    heard = tmp_path / "heard"
    writes = f"import sys; open({str(heard)!r}, 'a').write(sys.stdin.read() + chr(10))"
    own_hub.start("--on-alert", f"{sys.executable} -c {json.dumps(writes)}")
    client, fleet = opened(Client(own_hub.endpoints.clients)), opened(Fleet(own_hub.endpoints.ranks))
    poll_until(client, lambda: len(client.state.hellos) == 4, fleet.turn)
    fleet.agents[0].send(structs.replace(make_summary(1_000), loss=math.nan))
    poll_until(client, lambda: ("nan", "run") in client.state.alerts)
    for step in range(1_001, 1_004):
        known = len(client.state.summaries)
        fleet.agents[0].send(make_summary(step))
        poll_until(client, lambda: len(client.state.summaries) > known or not client.state.alerts)  # noqa: B023
        if step < 1_003:
            threading.Event().wait(0.7)  # long enough for the hub to check once
    poll_until(client, lambda: not client.state.alerts)
    failures = [event for event in client.state.events if "alert" in event.facts]
    assert [event.text for event in failures] == [
        "loss is nan at step 1000",
        "over: loss is nan at step 1000",
    ]
    assert [(one.facts["alert"], one.facts["subject"], one.facts["active"]) for one in failures] == [
        ("nan", "run", True),
        ("nan", "run", False),
    ]
    assert failures[0].facts["step"] == 1_000
    poll_until(client, lambda: heard.exists() and heard.read_text().count("\n") == 2)
    first, second = (json.loads(line) for line in heard.read_text().splitlines())
    assert (first["run"], first["name"], first["active"], second["active"]) == ("r", "nan", True, False)


def test_a_url_is_posted_to() -> None:
    posted: list[bytes] = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Server) as server:
        url = f"http://127.0.0.1:{server.server_port}/alerts"
        for target in (url, f"slack+{url}"):
            Notifier("r", target).notify(structs.replace(ALERT, text="the run is <stuck> & waits"))
            server.handle_request()
    told, message = map(json.loads, posted)
    assert (told["run"], told["text"], told["ranks"]) == ("r", "the run is <stuck> & waits", [3])
    assert message == {"text": "error · r · step 7 · the run is &lt;stuck&gt; &amp; waits"}
    assert slack_message("r", structs.replace(ALERT, active=False))["text"].startswith("ended · r · step 7")


def test_a_failed_notification_is_only_a_problem_report() -> None:
    notifier = Notifier("r", "/nowhere/at-all --now")
    for _ in range(1_000):
        notifier.notify(ALERT)  # a full queue must not raise an error
    waits = threading.Event()
    failures: list[str] = []
    while not failures and not waits.wait(0.02):
        failures = notifier.problems()
    assert failures[0] == "at-all did not receive an alert: FileNotFoundError"


def test_a_faulty_server_is_reported_without_the_url() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        notifier = Notifier("r", f"http://127.0.0.1:{server.getsockname()[1]}/the-secret")
        for _ in range(2):
            notifier.notify(ALERT)
            with server.accept()[0] as connection:
                connection.sendall(b"rubbish\r\n\r\n")
    failures: list[str] = []
    waits = threading.Event()
    while len(failures) < 2 and not waits.wait(0.02):
        failures += notifier.problems()
    assert all(one.startswith("127.0.0.1 did not receive an alert") for one in failures)


@pytest.mark.parametrize(
    "target",
    ["http://", "", "an 'open quote", "slack+ftp://host/path", "slack+", "ftp://host/path", "http://[x"],
)
def test_an_invalid_target_is_refused(target: str) -> None:
    with pytest.raises(RunError):
        Notifier("r", target)


def test_a_run_reports_an_invalid_target_at_its_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ON_ALERT, "sh -c true")
    assert _environ_of_hub() == dict(os.environ) and not capsys.readouterr().err
    monkeypatch.setenv(ON_ALERT, "ftp://user:secret@host")
    assert ON_ALERT not in _environ_of_hub(), "the hub starts without it"
    assert capsys.readouterr().err == (
        "COCKPIT_ON_ALERT: alerts cannot be sent to a URL that begins with ftp://; legal: a command, "
        "http(s)://HOST/PATH, or slack+https://HOST/PATH; the run continues and sends no alerts\n"
    )


def test_the_end_of_a_failed_run_is_notified_before_the_hub_ends(
    own_hub: HubProcess, opened: Opened, tmp_path: Path
) -> None:
    """When a rank dies, the launcher stops the hub at once, long before the hub would detect that the rank is lost."""
    own_hub.kill()
    heard = tmp_path / "heard"
    writes = f"import sys, time; time.sleep(0.5); open({str(heard)!r}, 'a').write(sys.stdin.read())"
    own_hub.start("--on-alert", f"{sys.executable} -c {json.dumps(writes)}")
    client, fleet = opened(Client(own_hub.endpoints.clients)), opened(Fleet(own_hub.endpoints.ranks))
    poll_until(client, lambda: len(client.state.hellos) == 4, fleet.turn)
    why = "rank 2 (dp2) was killed by SIGKILL at step 7"
    (own_hub.folder / "failure.txt").write_text(f"2026-11-21 12:00:00 {why}\n")
    assert own_hub.stop() == 0
    told = json.loads(heard.read_text())
    assert (told["name"], told["level"], told["active"], told["text"]) == ("failed", "error", True, why)
    poll_until(client, lambda: ("failed", "run") in client.state.alerts)


def test_a_run_without_a_goodbye_is_reported_as_ended(
    own_hub: HubProcess, opened: Opened, tmp_path: Path
) -> None:
    own_hub.kill()
    client = opened(Client(own_hub.endpoints.clients))
    fleet = opened(Fleet(own_hub.endpoints.ranks))
    launcher = subprocess.Popen(["sleep", "60"])
    own_hub.start("--parent", str(launcher.pid))
    poll_until(client, lambda: len(client.state.hellos) == 4, fleet.turn)
    launcher.kill()
    launcher.wait()
    poll_until(client, lambda: ("failed", "run") in client.state.alerts)
    assert client.state.alerts["failed", "run"].text == "the run has ended without a goodbye"


def test_queued_alerts_are_sent_at_the_end_within_a_limit(tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    notifier = Notifier("r", f"sh -c 'cat >/dev/null; echo sent >>{heard}'")
    for _ in range(3):
        notifier.notify(ALERT)
    assert notifier.close() == [] and heard.read_text() == "sent\n" * 3
    hangs = Notifier("r", "sleep 2")
    hangs.notify(ALERT)
    assert hangs.close(0.05) == ["sleep did not receive the last alerts within 0.05 s"]


def test_a_silent_rank_is_one_line_of_the_log(own_hub: HubProcess, opened: Opened) -> None:
    client, fleet = opened(Client(own_hub.endpoints.clients)), opened(Fleet(own_hub.endpoints.ranks))
    poll_until(client, lambda: len(client.state.hellos) == 4, fleet.turn)
    fleet.agents[2].mute(True)
    poll_until(client, lambda: ("silent", "run") in client.state.alerts, fleet.turn)
    assert client.state.alerts["silent", "run"].ranks == [2]
    errors = [event for event in client.state.events if isinstance(event, Event) and event.level == "error"]
    assert len(errors) == 1 and "rank 2 (dp2) is silent" in errors[0].text
