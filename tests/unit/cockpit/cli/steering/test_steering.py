"""Tests of the commands preview, try, undo and log with a real hub, including a hub that is killed just before a
request."""

import json
import threading
from collections.abc import Iterator

import pytest

from agents.client import Client
from cockpit.cli.main import run
from tests.unit.agents.fleet import Fleet, HubProcess, poll_until

Said = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    hub = HubProcess(tmp_path_factory.mktemp("runs") / "r-1").start()
    fleet = Fleet(hub.endpoints.ranks)
    fleet.step_ms = lambda values: 5.0 if values["micro_batches"] == 8 else 10.0  # type: ignore[method-assign]
    done = threading.Event()

    def train() -> None:
        while not done.wait(0.02):
            fleet.turn()

    thread = threading.Thread(target=train)
    thread.start()
    client = Client(hub.endpoints.clients)
    poll_until(client, lambda: client.state.board and client.state.summaries)
    client.close()
    yield hub
    done.set()
    thread.join()
    fleet.close()
    hub.clean_up()


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, hub: HubProcess) -> None:
    monkeypatch.setenv("COCKPIT_RUNS", str(hub.folder.parent))


def told(capsys: Said, *words: str, status: int = 0) -> dict[str, object]:
    assert run([*words, "--json"]) == status
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_a_clearly_faster_trial_is_kept_and_can_be_undone(capsys: Said) -> None:
    trial = told(capsys, "try", "micro_batches=8", "--steps", "6", "--reason", "a hunch")
    assert (trial["state"], trial["reason"]) == ("kept", "a hunch")
    assert trial["high"] == pytest.approx(0.5, abs=0.01)
    undone = told(capsys, "undo", "--wait")
    assert (undone["state"], undone["before"]) == ("applied", {"micro_batches": 8})
    assert told(capsys, "undo", status=3)["why"] == "there is no change to undo"


def test_the_log_has_operator_reason_and_values(capsys: Said) -> None:
    told(capsys, "set", "recompute=full", "--wait", "--reason", "memory")
    assert run(["log", "--json"]) == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    command = next(e["command"] for e in entries if e.get("command", {}).get("reason") == "memory")
    assert (command["before"], command["changes"]) == ({"recompute": "none"}, {"recompute": "full"})
    assert command["who"] and command["asked_s"] and command["applied_step"]
    assert run(["log"]) == 0
    assert "recompute none→full · applied 4/4" in capsys.readouterr().out


def test_ranks_without_previews_refuse_the_query(capsys: Said) -> None:
    assert told(capsys, "preview", "micro_batches=8", status=3)["why"] == (
        "the ranks of this run do not support previews"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["try"], "a trial needs a change: cockpit try knob=value [knob=value ...] [--steps N]"),
        (["try", "--keep"], "no trial is running"),
        (["try", "micro_batches=8", "--keep"], "they take no knob"),
        (
            ["try", "micro_batches=8", "--steps", "2"],
            "--steps: '2' is not legal; legal: a whole number from 4 to 10000",
        ),
        (
            ["autopilot", "--within", "micro_batches=1..8", "--max-changes", "0"],
            "--max-changes: '0' is not legal; legal: a whole number from 1 to 2147483647",
        ),
        (
            ["stacks", "--ranks", "a"],
            "--ranks: 'a' is not legal; legal: at most 4096 ranks, such as 0,3,8-11",
        ),
        (["snapshot", "--wrong"], "unrecognized arguments: --wrong (see cockpit snapshot --help)\n"),
        (
            ["set", "lr_scale=1", "--reason", "a" * 4097],
            "--reason has 4097 characters; legal: at most 4096\n",
        ),
    ],
)
def test_one_sentence(capsys: Said, words: list[str], said: str) -> None:
    assert run(words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_command_waits_for_a_restarting_hub(capsys: Said, hub: HubProcess) -> None:
    hub.kill()
    again = threading.Timer(0.5, hub.start)
    again.start()
    applied = told(capsys, "set", "micro_batches=2", "--wait")
    again.join()
    assert (applied["state"], applied["acks"]) == ("applied", 4)


def test_the_log_of_an_ended_run_has_every_command(capsys: Said, hub: HubProcess) -> None:
    hub.stop()
    assert run(["log", "--json", "--run", "r-1"]) == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    reasons = [e["command"]["reason"] for e in entries if "command" in e]
    assert "memory" in reasons and any("trial" in e for e in entries)
