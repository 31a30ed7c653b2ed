"""Printed text contains no control characters, even if names in the run contain some."""

import json
import re
from pathlib import Path

import pytest
from msgspec import structs

import cockpit
from agents.protocol import KnobState, Legal, Step
from cockpit.cli.show import headless
from cockpit.cli.steer import steering
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.diagnosis.status import state_field
from cockpit.data.sources.recorded import RunSnapshot
from cockpit.data.store import Store
from cockpit.printing import complain, print_line, print_table
from tests.screens.hostile_run import TURN, HostileRun, hostile

ESCAPE = "\x1b[2J"


@pytest.fixture(autouse=True)
def picture(monkeypatch: pytest.MonkeyPatch) -> Store:
    """A run whose names contain control characters; every headless command loads it."""
    store, run = Store(lambda: 100.0), HostileRun(oversubscribed=False, slow_rank=None)
    store.apply(run.story(12, change_at=5))
    board = store.state.board
    assert board
    odd = KnobState(
        f"{ESCAPE}knob", f"{TURN}now\n", Legal([f"{TURN}a", f"b{ESCAPE}\nc"]), True, f"{ESCAPE}about"
    )
    store.apply([structs.replace(board, knobs=[*board.knobs, odd])])
    phases = {f"{ESCAPE}phase{TURN}\n": 1e6}
    store.apply(
        hostile(structs.replace(one, step=12, phases=phases)) for one in run.step(12) if isinstance(one, Step)
    )
    store.set_message_age(0.0)
    monkeypatch.setattr(headless, "load_snapshot", lambda run, at=None: RunSnapshot(store, "e", 1))
    monkeypatch.setattr(headless, "is_over", lambda run: False)
    return store


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    found = capsys.readouterr()
    # `splitlines` would also split at other characters, such as form feeds
    lines = (found.out + found.err).split("\n")
    assert lines.pop() == ""
    assert [line for line in lines if not line.isprintable()] == []
    return lines


def test_knobs_with_choices_that_are_escape_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert headless.knobs("r", as_json=False) == 0
    lines = printed(capsys)
    assert len(lines) == 1 + 5 + 1 and "b [2J c" in lines[-2]


def test_snapshot_with_its_diagnosis(capsys: pytest.CaptureFixture[str], picture: Store) -> None:
    for gone in list(picture.state.gone):
        del picture.state.gone[gone]
    picture.state.alerts.clear()
    picture.state.trials.clear()
    assert picture.summary
    picture.apply([structs.replace(picture.summary, step=13, bubble=0.1)])  # without any problem to report
    assert headless.snapshot("r", None, as_json=False) == 0
    assert "phase" in printed(capsys)[1]


def test_snapshot_begins_like_the_screen(capsys: pytest.CaptureFixture[str], picture: Store) -> None:
    """The first line contains the run's state and the headline of the diagnosis, and begins with the glyph of the more
    severe of their two levels."""
    state = state_field(picture)
    assert state.level is Level.BAD and " · " in state.text
    assert headless.snapshot("r", None, as_json=False) == 0
    assert printed(capsys)[0].startswith(f"✗ {state.text} · ")


def test_log(capsys: pytest.CaptureFixture[str]) -> None:
    assert headless.log("r", as_json=False) == 0
    lines = printed(capsys)
    assert any("reverse second line" in line for line in lines)
    assert headless.log("r", as_json=True) == 0
    assert [json.loads(line)["level"] for line in printed(capsys)]


def test_every_way_of_printing(capsys: pytest.CaptureFixture[str]) -> None:
    for print_one in (print_line, complain):
        print_one(f"{ESCAPE}{TURN}\x9b\r\n\u2028x")
    print_table([["a", f"{ESCAPE}\n"], [f"{TURN}", "b"]])
    assert len(printed(capsys)) == 4
    assert steering.print_line is print_line


def test_every_line_is_printed_through_the_printing_module() -> None:
    """Only Textual's screen and the bytes of exports are not written through printing.py."""
    package = Path(cockpit.__file__).parent
    direct = re.compile(r"\bprint\(|std(out|err)\.write\(")
    found = {path.name for path in package.rglob("*.py") if direct.search(path.read_text())}
    assert found == {"printing.py"}
