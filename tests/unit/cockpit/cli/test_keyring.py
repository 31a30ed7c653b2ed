"""`cockpit keys`, and connections to a hub over TCP from the command line."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.protocol.base import RunError
from agents.rundir import hub_file as hub_file_module
from agents.rundir.hub_file import HubFile, read_hub_file
from agents.rundir.local_machine import this_host
from agents.transport.curve_keys import KEY_VARIABLE
from cockpit.cli.exit_status import REFUSED
from cockpit.cli.main import run
from cockpit.data.sources.connection import CockpitError, address
from tests.unit.agents.conftest import Opened, opened
from tests.unit.agents.fleet import Fleet, HubProcess

__all__ = ["opened"]

Said = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COCKPIT_KEYS", str(tmp_path / "keys"))
    monkeypatch.setenv("COCKPIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv(KEY_VARIABLE, "")
    return tmp_path / "keys"


def listen(folder: Path) -> HubProcess:
    return HubProcess(folder).start("--listen", "auto")


def hub_file(folder: Path, after: str = "") -> HubFile:
    """Wait until a starting hub has written `hub.json`; the file of the previous hub, whose epoch is `after`, is
    ignored."""
    deadline = time.monotonic() + 15
    while True:
        assert time.monotonic() < deadline, "the hub did not start"
        try:
            found = read_hub_file(folder)
        except RunError:
            found = None
        if found and found.epoch != after:
            return found
        time.sleep(0.02)


@pytest.fixture
def hub(tmp_path: Path, keys: Path) -> Iterator[HubProcess]:
    process = listen(tmp_path / "runs" / "r-1")
    yield process
    process.clean_up()


def test_keys_are_made_listed_and_revoked(capsys: Said, keys: Path) -> None:
    assert run(["keys", "make", "ann", "--role", "viewer", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["file"] == str(keys / "ann.key") and made["role"] == "viewer"
    assert run(["keys", "revoke", "ann", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["revoked_s"] > 0
    assert run(["keys", "make", "bob", "--role", "operator"]) == 0
    assert str(keys / "bob.key") in capsys.readouterr().out
    assert run(["keys", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["keys"]
    assert [(row["name"], row["revoked_s"] is None, bool(row["file"])) for row in listed] == [
        ("ann", False, False),
        ("bob", True, True),
    ]
    assert run(["keys", "list"]) == 0
    shown = capsys.readouterr().out
    assert "revoked" in shown and "in force" in shown


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["keys"], "required: make|list|revoke"),
        (["keys", "make", "a/b", "--role", "rank"], "cannot be named"),
        (["keys", "make", "ann"], "required: --role"),
        (["keys", "make", "ann", "--role", "boss"], "'rank', 'viewer', 'operator'"),
        (["keys", "revoke", "zed"], "no key zed in force; the keys in force are: none"),
        (["attach", "tcp://127.0.0.1:5555"], "requires a key of role viewer or operator"),
        (["attach", "tcp://127.0.0.1:5555", "--operator"], "requires a key of role operator"),
        (["attach", "tcp://127.0.0.1:5555", "--key", "/nowhere"], "/nowhere cannot be read: No such file"),
        (["attach", "tcp://*:5555"], "is not the address of a hub"),
        (["snapshot", "--run", "tcp://127.0.0.1"], "is not a TCP address; legal: tcp://HOST:PORT"),
    ],
)
def test_an_invalid_command_gets_one_sentence(capsys: Said, words: list[str], sentence: str) -> None:
    assert run(words) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1


def test_a_rank_key_is_refused_by_the_cockpit(capsys: Said, keys: Path) -> None:
    run(["keys", "make", "ann", "--role", "viewer"])
    run(["keys", "make", "node", "--role", "rank"])
    assert run(["attach", "tcp://127.0.0.1:5555", "--key", str(keys / "node.key")]) == 2
    assert (
        "node.key is a key of role rank; the cockpit needs one of role viewer or operator"
        in capsys.readouterr().err
    )


def test_a_connection_that_only_watches_takes_no_operator_key(keys: Path) -> None:
    run(["keys", "make", "boss", "--role", "operator"])
    assert (found := address("tcp://127.0.0.1:5555").key) and found.name == "boss"
    with pytest.raises(CockpitError, match="requires a key of role viewer"):
        address("tcp://127.0.0.1:5555", watch_only=True)
    with pytest.raises(CockpitError, match="no socket for viewers beside ipc:///nowhere/clients"):
        address("ipc:///nowhere", watch_only=True)


def test_the_hub_of_another_machine_is_found_in_the_shared_folder(
    hub: HubProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = hub_file(hub.folder)
    assert address("r-1").endpoint == found.endpoints.viewers, "on its own machine over ipc, without a key"
    assert address("r-1", operator=True).endpoint == found.endpoints.clients
    assert found.tcp is not None
    run(["keys", "make", "ann", "--role", "viewer"])
    monkeypatch.setattr(hub_file_module, "this_machine", lambda: "the.login.node")
    for name in ("r-1", None):
        there = address(name)
        assert there.endpoint == found.tcp.clients and there.key and there.key.name == "ann"


def test_a_viewer_may_query_a_preview(hub: HubProcess, opened: Opened, capsys: Said) -> None:
    """The client connects over TCP, and its only key has the role viewer."""
    found = hub_file(hub.folder)
    assert found.tcp is not None
    run(["keys", "make", "ann", "--role", "viewer"])
    opened(Fleet(hub.endpoints.ranks))
    capsys.readouterr()
    assert run(["preview", "micro_batches=8", "--run", found.tcp.clients]) == REFUSED
    assert "the ranks of this run do not support previews" in capsys.readouterr().out
    assert run(["set", "micro_batches=8", "--run", found.tcp.clients]) == 2
    assert "requires a key of role operator" in capsys.readouterr().err


def test_a_hub_on_another_machine_is_reported_with_its_host(
    capsys: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = HubProcess(tmp_path / "runs" / "r-2").start()
    try:
        hub_file(process.folder)
        here = this_host()
        monkeypatch.setattr(hub_file_module, "this_machine", lambda: "the.login.node")
        assert run(["snapshot", "--run", "r-2"]) == 2
        assert f"runs on {here} and listens only there" in capsys.readouterr().err
    finally:
        process.clean_up()


def test_a_recording_that_another_machine_writes_is_refused(
    hub: HubProcess, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the run is live, SQLite keeps the index of the write-ahead log in the memory of the machine that writes the
    recording, so no other machine can read it. After the run, no process writes the recording any more, so any machine
    can read it."""
    hub_file(hub.folder)
    here = this_host()
    monkeypatch.setattr(hub_file_module, "this_machine", lambda: "the.login.node")
    for words in (
        ["replay", "r-1"],
        ["export", "r-1", "--format", "ndjson"],
        ["snapshot", "--run", "r-1", "--at", "1"],
    ):
        assert run(words) == 2
        said = capsys.readouterr().err
        assert f"is being written on {here}, and cannot be read from another machine" in said
        assert said.count("\n") == 1
    hub.stop()
    assert run(["export", "r-1", "--format", "ndjson"]) == 0


def test_a_restarted_hub_listens_on_the_same_port(hub: HubProcess) -> None:
    before = hub_file(hub.folder)
    hub.kill()
    hub.start("--listen", "auto")
    after = hub_file(hub.folder, before.epoch)
    assert after.tcp == before.tcp


@pytest.mark.parametrize("place", ["tcp://*:5555", "tcp://0.0.0.0:auto", "tcp://192.0.2.1:5555", "5555"])
def test_a_hub_that_cannot_listen_reports_it(
    tmp_path: Path, place: str, capfd: pytest.CaptureFixture[str]
) -> None:
    process = HubProcess(tmp_path / "run").start("--listen", place)
    assert process.process.wait(15) == 2
    said = capfd.readouterr().err
    assert said.startswith("the hub cannot start: ") and place in said and said.count("\n") == 1
    assert not list(process.endpoints.directory.glob("*")), "no socket remains"
    process.clean_up()
