"""Commands where several runs are live: a change needs the run's name, and every answer names its run."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.client import Client
from agents.rundir.runs import RunError, find_folder
from cockpit.cli.main import run
from tests.unit.agents.fleet import Fleet, HubProcess, poll_until
from tests.unit.cockpit.schemas import check

Said = pytest.CaptureFixture[str]
STEERING = (
    ["set", "micro_batches=8"],
    ["undo"],
    ["try", "micro_batches=8"],
    ["try", "--revert"],
    ["relayout", "grid.tp=2"],
    ["autopilot", "--within", "micro_batches=1..8"],
    ["profile"],
)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the live runs net-1 and other-2, whose ranks call both of them r, and the recorded run net-0."""
    runs = tmp_path_factory.mktemp("runs")
    (runs / "net-0").mkdir()
    (runs / "net-0" / "run.db").touch()
    hubs = [HubProcess(runs / name).start() for name in ("net-1", "other-2")]
    fleets = [Fleet(hub.endpoints.ranks) for hub in hubs]
    done = threading.Event()

    def train() -> None:
        while not done.wait(0.05):
            for fleet in fleets:
                fleet.turn()

    thread = threading.Thread(target=train)
    thread.start()
    for hub in hubs:
        client = Client(hub.endpoints.clients)
        poll_until(client, lambda client=client: client.state.summaries and len(client.state.hellos) == 4)
        client.close()
    yield runs
    done.set()
    thread.join()
    for fleet in fleets:
        fleet.close()
    for hub in hubs:
        hub.clean_up()


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, two: Path) -> None:
    monkeypatch.setenv("COCKPIT_RUNS", str(two))


@pytest.mark.parametrize("words", STEERING, ids=lambda words: " ".join(words[:2]))
def test_a_change_without_a_name_is_refused(capsys: Said, words: list[str]) -> None:
    assert run(words) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == (
        "",
        "2 runs are live, so name the one to change: net-1, other-2\n",
    )


@pytest.mark.parametrize("name", ["net-1", "other-2"])
def test_every_answer_names_its_run(capsys: Said, name: str) -> None:
    for words, schema in (
        (["set", "micro_batches=8", "--wait"], "set"),
        (["set", "micro_batches=3", "--wait"], "set"),
        (["undo", "--wait"], "undo"),
        (["knobs"], "knobs"),
        (["stacks", "--ranks", "1"], "stacks"),
    ):
        run([*words, "--run", name, "--json"])
        record = json.loads(capsys.readouterr().out)
        check(schema, record)
        assert record["run"] == name, words
        run([*words, "--run", name])
        assert f" · run {name}\n" in capsys.readouterr().out, words
    # An error that appears only after the connection, and one about a trial that does not run.
    assert run(["set", "frobnicate", "--run", name]) == 2
    assert f" · run {name}\n" in capsys.readouterr().err
    assert run(["try", "--revert", "--run", name]) == 2
    assert capsys.readouterr().err.endswith(f" · run {name}\n")


def test_runs_are_found_by_the_screens_name_and_by_unique_prefixes(two: Path, capsys: Said) -> None:
    assert find_folder("o", two) == two / "other-2"
    assert find_folder("net-1", two) == two / "net-1"
    with pytest.raises(RunError, match="net can be any of 2 runs: net-"):
        find_folder("net", two)
    with pytest.raises(RunError, match=r"r can be any of 2 runs: (net-1, other-2|other-2, net-1)"):
        find_folder("r", two)  # both are shown as r
    for none in ("", ".", "..", "...", "x", "/"):
        with pytest.raises(RunError):
            find_folder(none, two)
    assert run(["export", "other", "--format", "ndjson", "--out", str(two / "out")]) == 0
    assert "updates in" in capsys.readouterr().out
    assert run(["knobs", "other", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"] == "other-2"


def test_the_name_on_the_screen_of_a_live_run_comes_before_prefixes(two: Path) -> None:
    (two / "r-0").mkdir()
    try:
        (two / "r-0" / "run.db").touch()
        with pytest.raises(RunError, match="r can be any of 2 runs"):  # of the live ones; r-0 has ended
            find_folder("r", two)
    finally:
        (two / "r-0" / "run.db").unlink()
        (two / "r-0").rmdir()
