"""Real `--json` outputs of each command satisfy the published schemas. If a field disappears, these tests fail."""

import json
import shutil
import time
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agents.protocol import RankStacks, StacksCollected, ThreadStack
from agents.protocol.connection import Update
from agents.protocol.stacks import CodeFrame, Unanswered
from agents.state.stack_groups import explanation
from cockpit.cli.main import run as cockpit
from cockpit.cli.schemas.command import names, schema
from cockpit.cli.show import stacks
from engine.cli.main import main as engine
from engine.planner.hardware.table import hardware
from tests.unit.cockpit.simulated_run import NAME, simulated_run
from tests.unit.engine.config.test_layout import DEMO
from tests.unit.engine.simulate.simulated import LAYOUT

pytest.importorskip("jsonschema", reason="needs jsonschema, of the extra dev")
from tests.unit.cockpit.schemas import check

Printed = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A live simulated run, until `test_outputs_of_an_ended_run` stops it."""
    folder = tmp_path_factory.mktemp("runs")
    with simulated_run(folder):
        yield folder


@pytest.fixture(autouse=True)
def here(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COCKPIT_RUNS", str(runs))
    monkeypatch.setenv("COCKPIT_KEYS", str(runs / "keys"))


def printed(capsys: Printed, *words: str, status: int = 0) -> list[Any]:
    """The JSON records that a command prints, one per line."""
    assert cockpit(list(words)) == status
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert records
    return records


CHANGING = (
    ("preview", 0, "preview", "micro_batches=16"),
    ("preview", 3, "preview", "micro_batches=3"),
    ("set", 0, "set", "micro_batches=16"),
    ("set", 0, "set", "lr_scale=0.5", "--wait"),
    ("set", 3, "set", "micro_batches=3"),
    ("undo", 0, "undo", "--wait"),
    ("try", 0, "try", "micro_batches=4", "--steps", "4"),
    ("try", 3, "try", "micro_batches=3", "--steps", "4"),
    ("advise", 0, "advise"),
    ("autopilot", 0, "autopilot", "--within", "micro_batches=2..16", "--steps", "4", "--max-changes", "1"),
)
READING = (
    ("status", 0, "status"),
    ("snapshot", 0, "snapshot"),
    ("snapshot", 0, "snapshot", "--filter", "pp=1"),
    ("knobs", 0, "knobs"),
    ("info", 0, "info"),
    ("log", 0, "log"),
    ("runs", 0, "runs"),
    ("where", 0, "where"),
    ("stacks", 1, "stacks"),
)


def test_outputs_of_a_live_run(capsys: Printed) -> None:
    for name, status, *words in (*CHANGING, *READING):
        check(name, *printed(capsys, *words, "--json", status=status))


def test_outputs_of_an_ended_run(runs: Path, capsys: Printed) -> None:
    """This test stops the run, so it runs after `test_outputs_of_a_live_run`."""
    assert cockpit(["set", "stop", "--wait", "--json"]) in (
        0,
        3,
    )  # 3: the hub ended before the outcome arrived
    capsys.readouterr()
    deadline = time.monotonic() + 30
    while (runs / NAME / "hub.json").exists():
        assert time.monotonic() < deadline, "the run did not end"
        time.sleep(0.05)
    updates = printed(capsys, "watch", "--run", NAME, "--json")
    some = {(record["kind"], number % 97 == 0): record for number, record in enumerate(updates)}
    assert {kind for kind, _ in some} >= {
        "snapshot",
        "step",
        "summary",
        "trialstate",
        "commandstate",
        "gone",
        "event",
    }
    check("watch", *some.values())
    exported = printed(capsys, "export", NAME, "--format", "ndjson")
    check("export-ndjson", *{record["kind"]: record for record in exported}.values())
    shutil.copytree(runs / NAME, runs / "copy")
    for name, *words in (
        ("snapshot", "snapshot", "--at", "20", NAME),
        ("info", "info", NAME),
        ("log", "log", NAME),
        ("runs", "runs"),
        ("compare", "compare", NAME, "copy"),
        ("export", "export", NAME, "--format", "csv"),
    ):
        check(name, *printed(capsys, *words, "--json"))
    assert cockpit(["status", "--json", "--run", NAME]) == 2


def test_outputs_about_keys(capsys: Printed) -> None:
    check("keys-make", *printed(capsys, "keys", "make", "ann", "--role", "viewer", "--json"))
    check("keys-list", *printed(capsys, "keys", "list", "--json"))
    check("keys-revoke", *printed(capsys, "keys", "revoke", "ann", "--json"))


def test_stacks_of_ranks() -> None:
    thread = ThreadStack("MainThread", [CodeFrame("train.py", 7, "step", "loss.backward()")])
    answers = [RankStacks(rank, "q", 3, "forward", 1.0, [thread]) for rank in range(2)]
    end = StacksCollected("q", 3, 2, [Unanswered(2, "it is stopped")])
    check("stacks", stacks.record(explanation(answers, end), answers, end))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("engine-plan", ["plan", DEMO]),
        ("engine-plan", ["plan", DEMO, "--hardware", "H100"]),
        ("engine-plan-search", ["plan", DEMO, "--search", "--gpus", "8", "--hardware", "H100"]),
        ("engine-plan-roofline", ["plan", DEMO, "--roofline", "--hardware", "H100"]),
        ("engine-plan-scaling", ["plan", DEMO, "--scaling", "strong", "--hardware", "H100"]),
        ("engine-layouts", ["layouts"]),
    ],
)
def test_outputs_of_the_planner(capsys: Printed, name: str, words: list[Any]) -> None:
    try:
        engine([*map(str, words), "--json"])
    except SystemExit as done:
        assert done.code in (0, None)
    check(name, *map(json.loads, capsys.readouterr().out.splitlines()))


def test_outputs_of_a_simulation(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "layout.toml").write_text(LAYOUT)
    words = ["simulate", str(tmp_path / "layout.toml"), "--steps", "3", "--speed", "max", "--hub", "none"]
    with pytest.raises(SystemExit):
        engine([*words, "--run-dir", str(tmp_path / "run"), "--json"])
    records = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [record["event"] for record in records] == ["start", "step", "step", "step", "end"]
    check("engine-simulate", *records)
    check("engine-run", *records)


def test_a_description_of_a_machine() -> None:
    check("engine-probe", json.loads(msgspec.json.encode(hardware("H100"))))


@pytest.mark.parametrize("kind", typing.get_args(Update), ids=lambda kind: kind.__name__)
def test_the_schema_of_an_update_has_all_fields(kind: type[msgspec.Struct]) -> None:
    """The schema of an update lists exactly the fields of the message, in the same order, and requires all of them."""
    found = schema("watch")["$defs"][kind.__name__.lower()]
    assert list(found["properties"]) == list(kind.__struct_fields__) == found["required"]


def test_a_missing_field_fails(capsys: Printed) -> None:
    record = printed(capsys, "keys", "list", "--json")[0]
    del record["folder"]
    with pytest.raises(AssertionError, match="'folder' is a required property"):
        check("keys-list", record)


def test_schemas_are_printed(capsys: Printed) -> None:
    for name in names():
        assert cockpit(["schema", name]) == 0
        assert json.loads(capsys.readouterr().out) == schema(name)
    assert cockpit(["schema"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in names())
    assert cockpit(["schema", "nonsense"]) == 2
    error = capsys.readouterr().err
    assert "there is no output nonsense; the outputs are advise," in error and error.count("\n") == 1
