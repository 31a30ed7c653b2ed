"""Tests of the headless commands against a real hub process. A thread of the test simulates the run's four ranks: it
reports steps and applies changes, but trains nothing."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import cockpit
from agents.client import Client
from agents.protocol import Changes, CommandState
from agents.rundir.runs import newest_live
from cockpit.cli.main import run
from cockpit.cli.show.status import _reason, _replaced
from cockpit.cli.steer import steering
from cockpit.data.link import STALE_AFTER_S, LinkState
from cockpit.data.plain import to_json
from cockpit.data.sources.connection import CockpitError, Connection
from tests.unit.agents.fleet import Fleet, HubProcess, poll_until

ROOT = Path(cockpit.__file__).parent.parent


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of runs with one live run: a hub process, and agents that report steps although nothing trains."""
    runs = tmp_path_factory.mktemp("runs")
    hub = HubProcess(runs / "r-1").start()
    deadline = time.monotonic() + 15
    while newest_live(runs) is None:
        assert time.monotonic() < deadline, "the hub did not start"
        time.sleep(0.02)
    fleet = Fleet(hub.endpoints.ranks)
    done = threading.Event()

    def train() -> None:
        while not done.wait(0.05):
            fleet.turn()

    thread = threading.Thread(target=train)
    thread.start()
    client = Client(hub.endpoints.clients)
    poll_until(client, lambda: client.state.summaries and len(client.state.hellos) == 4)
    client.close()
    yield runs
    done.set()
    thread.join()
    fleet.close()
    hub.clean_up()


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, training: Path) -> None:
    monkeypatch.setenv("COCKPIT_RUNS", str(training))


Said = pytest.CaptureFixture[str]


def test_snapshot(capsys: Said) -> None:
    assert run(["snapshot", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["run"] == "r"
    assert shown["world"] == 4
    assert [rank["rank"] for rank in shown["ranks"]] == [0, 1, 2, 3]
    assert shown["ranks"][1]["coords"] == {"dp": 1}
    assert shown["summary"]["mfu"] is None
    assert {knob["name"] for knob in shown["knobs"]} == {"micro_batches", "recompute"}
    assert run(["snapshot", "--run", "r-1"]) == 0
    assert "LIVE" in capsys.readouterr().out


def test_knobs(capsys: Said) -> None:
    assert run(["knobs", "--json"]) == 0
    board = json.loads(capsys.readouterr().out)
    assert board["knobs"][0]["legal"]["choices"] == [1, 2, 4, 8]
    assert run(["knobs"]) == 0
    assert "1 2 4 8" in capsys.readouterr().out


def test_set_waits_for_every_rank(capsys: Said) -> None:
    assert run(["set", "micro_batches=8", "recompute=full", "--wait", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["state"] == "applied"
    assert answer["acks"] == answer["world"] == 4
    assert answer["applied_step"] > 0
    assert run(["log", "--json"]) == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert any("micro_batches 4→8, recompute none→full" in entry["text"] for entry in entries)


def test_set_reports_ranks_that_did_not_apply_a_change(capsys: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: Changes = {"save": True, "lr_scale": 0.5}
    why = "the snapshot of step 7 was not saved: disk full"
    told = CommandState("a", 3, "applied", changes, {}, "me", 0.0, acks=2, world=2, applied_step=7, why=why)
    monkeypatch.setattr(steering, "wait_for_command", lambda *_, **__: told)
    assert run(["set", "micro_batches=8", "--wait"]) == 3
    assert capsys.readouterr().out == f"✗ applied 2/2 at step 7 · revision 3: {why} · run r-1\n"
    assert run(["set", "micro_batches=8", "--wait", "--json"]) == 3
    told_json = json.loads(capsys.readouterr().out)
    assert (told_json["why"], told_json["run"]) == (why, "r-1")


@pytest.mark.parametrize("change", ["micro_batches=3", "nothing=1", "recompute=true"])
def test_set_refused(capsys: Said, change: str) -> None:
    assert run(["set", change, "--wait", "--json"]) == 3
    answer = json.loads(capsys.readouterr().out)
    assert answer["state"] == "rejected"
    assert answer["why"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["set", "micro_batches"],
        ["set"],
        ["frob"],
        ["knobs", "--frob"],
        ["snapshot", "--run", "not-there"],
        ["snapshot", "--run", "tcp://somewhere:1"],
        ["attach", "not-there"],
        ["demo", "not-there.toml"],
        ["demo", "a.toml", "b.toml"],
        ["set", "a=1", "--timeout", "never"],
    ],
)
def test_bad_input_gets_one_sentence_and_exit_2(capsys: Said, arguments: list[str]) -> None:
    assert run(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1


def test_no_live_run(capsys: Said, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COCKPIT_RUNS", str(tmp_path))
    for arguments in ([], ["snapshot", "--json"], ["watch"]):
        assert run(arguments) == 2
        assert "no run in" in capsys.readouterr().err


def test_status_bar(capsys: Said) -> None:
    assert run(["status", "--lines", "5", "--width", "60"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and "LIVE" in lines[0] and all(len(line) <= 60 for line in lines)
    assert run(["status", "--style", "tmux", "--lines", "1"]) == 0
    assert capsys.readouterr().out.startswith("#[fg=")
    assert run(["status", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["link"], shown["coverage"]["world"]) == ("live", 4)
    assert run(["status", "--lines", "6"]) == 2
    assert "--lines" in capsys.readouterr().err


def test_status_follows_a_newer_run_once_its_hub_is_silent(training: Path, tmp_path: Path) -> None:
    """`cockpit status` must not keep showing the last state of a dead run while a newer run trains."""
    with Connection(None, low_bandwidth=True) as connection:
        connection.wait_for_snapshot()
        assert not _replaced(connection)
        connection.client.endpoint = "ipc:///an/earlier/run"
        assert not _replaced(connection)  # its hub still answers
        connection.store.set_message_age(STALE_AFTER_S + 1)
        assert connection.store.link is LinkState.STALE and _replaced(connection)


def test_why_no_run_is_shown_fits_the_status_bar() -> None:
    error = CockpitError(
        "no run in /scratch/teams/language/experiments/runs is live; start one, or name a run"
    )
    assert [text for _, text in _reason(error, 1, 60)] == ["· no live run: no run in …"]
    whole = [text for _, text in _reason(error, 3, 60)]
    assert len(whole) == 3 and " ".join(whole) == f"· no live run: {error}"


def test_watch_into_a_pipe_that_closes() -> None:
    """This test also checks that headless commands do not import Textual."""
    command = (
        "import sys; from cockpit.cli.main import run; status = run(['watch', '--json']);"
        "sys.stderr.write(f'{status} {\"textual\" in sys.modules}')"
    )
    watching = subprocess.Popen(
        [sys.executable, "-c", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    assert watching.stdout and watching.stderr
    first, second = watching.stdout.readline(), watching.stdout.readline()
    assert json.loads(first)["kind"] == "snapshot"
    assert json.loads(second)["kind"] in ("step", "summary", "pulse", "hello", "board")
    watching.stdout.close()
    assert watching.wait(15) == 0
    assert watching.stderr.read().decode() == "141 False"
    watching.stderr.close()


def test_untrusted_text_has_no_control_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["snapshot", "--run", "a\x1b[2J\x9b2Jb"]) == 2
    said = capsys.readouterr().err
    assert "there is no run a" in said and said.rstrip("\n").isprintable()


def test_json_escapes_control_characters() -> None:
    record = {"text": "a\x1b\x7f\x9b2Jb\u2028é"}
    line = to_json(record)
    assert line.isprintable() and json.loads(line) == record
