"""Headless commands that read the recording of an ended run."""

import json
import random
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agents.hub.commands.journal import Journal
from agents.protocol import CommandState
from agents.protocol.base import Changes
from agents.recording.commands import Entry
from cockpit.cli.main import run
from cockpit.data.sources.connection import runs_dir
from tests.unit.cockpit.conftest import STEPS

Said = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, runs: Path) -> Iterator[None]:
    monkeypatch.setenv("COCKPIT_RUNS", str(runs))
    yield


def said(capsys: Said, *words: str) -> str:
    assert run(list(words)) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_snapshot_at_the_end_and_at_a_step(capsys: Said) -> None:
    now = json.loads(said(capsys, "snapshot", "r-1", "--json"))
    assert (now["state"], now["link"], now["step"], now["age_s"]) == ("ENDED", "ended", STEPS - 1, None)
    then = json.loads(said(capsys, "snapshot", "--run", "r-1", "--at", "7", "--json"))
    assert (then["state"], then["summary"]["step"], len(then["ranks"])) == ("PLAYBACK", 7, 2)
    assert then["ranks"][1]["step"]["step"] == 7 and then["ranks"][1]["gone"] is None
    early = json.loads(said(capsys, "snapshot", "r-1", "--at", "seq:2", "--json"))
    assert (early["seq"], early["world"], early["step"], early["knobs"]) == (2, 2, None, [])
    again = json.loads(said(capsys, "snapshot", "r-1", "--at", f"{now['epoch']}:{then['seq']}", "--json"))
    assert again == then
    assert "PLAYBACK" in said(capsys, "snapshot", "r-1", "--at", "7")


def test_a_filter_restricts_ranks(capsys: Said) -> None:
    found = json.loads(said(capsys, "snapshot", "r-1", "--json", "--filter", "rank=1"))
    assert [one["rank"] for one in found["ranks"]] == [1]
    assert found["filter"] == {"text": "rank=1", "matching": 1, "without_data": 0}
    text = said(capsys, "snapshot", "r-1", "--filter", "power_w > 3")
    assert "/ power_w > 3: 0 of 2 · 2 without data" in text
    lines = [
        json.loads(line) for line in said(capsys, "watch", "r-1", "--json", "--filter", "rank=1").splitlines()
    ]
    assert sum(line["kind"] == "summary" for line in lines) == STEPS
    assert [line["rank"] for line in lines if line["kind"] == "step"] == [1] * STEPS


def test_watch_log_and_knobs(capsys: Said) -> None:
    lines = [json.loads(line) for line in said(capsys, "watch", "r-1", "--json").splitlines()]
    assert lines[0]["kind"] == "snapshot" and lines[0]["seq"] == 0
    assert sum(line["kind"] == "summary" for line in lines) == STEPS
    assert sum(line["kind"] == "step" for line in lines) == 2 * STEPS
    assert len(said(capsys, "watch", "r-1").splitlines()) == STEPS
    log = said(capsys, "log", "r-1")
    assert "an event of rank 1 · rank 1" in log and "micro_batches 4→8 · applied 2/2" in log
    assert json.loads(said(capsys, "knobs", "r-1", "--json"))["knobs"][0]["name"] == "micro_batches"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("snapshot", "r-1", "--filter", "ran=1"),
            "--filter: 'ran' is not expected at column 1; legal: rank, step",
        ),
        (("watch", "r-1", "--filter", "rank=1"), "--filter needs --json"),
        (["snapshot", "r-1", "--at", "99"], "holds the steps 0 to 29, not 99"),
        (["snapshot", "r-1", "--at", "seq:9999"], "not 9999"),
        (["snapshot", "r-1", "--at", "abc:1"], "no update of the hub process abc"),
        (["snapshot", "r-1", "--at", "soon"], "legal: a step such as 120"),
        (["snapshot", "bare", "--at", "1"], "there is no recording"),
        (["replay", "bare"], "there is no recording"),
        (["replay", "nowhere"], "there is no run nowhere"),
        (["replay", "r-1", "--speed", "0"], "--speed"),
    ],
)
def test_a_missing_position_or_run_gets_one_sentence(capsys: Said, words: list[str], sentence: str) -> None:
    assert run(words) == 2
    told = capsys.readouterr()
    assert sentence in told.err and told.err.count("\n") == 1 and not told.out


@pytest.fixture
def damaged(runs: Path, tmp_path: Path) -> Path:
    """A folder of runs with a copy of `r-1` that a test may damage."""
    (tmp_path / "r-1").mkdir()
    shutil.copy(runs / "r-1" / "run.db", tmp_path / "r-1")
    return tmp_path


@pytest.mark.parametrize("words", [("log",), ("snapshot",), ("export", "--format", "ndjson"), ("watch",)])
def test_a_flipped_bit_changes_nothing_or_is_reported(
    capsys: Said, monkeypatch: pytest.MonkeyPatch, runs: Path, damaged: Path, words: tuple[str, ...]
) -> None:
    command = [words[0], "r-1", *words[1:], *(["--json"] if words[0] != "export" else [])]
    whole = said(capsys, *command)
    monkeypatch.setenv("COCKPIT_RUNS", str(damaged))
    monkeypatch.setattr("agents.recording.database.BETWEEN_S", 0.0)
    data, path = (runs / "r-1" / "run.db").read_bytes(), damaged / "r-1" / "run.db"
    chance = random.Random(7)
    silent, kept = [], 0
    for _ in range(60):
        bit = chance.randrange(8 * len(data))
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        status = run(command)
        told = capsys.readouterr()
        if told.out != whole and not (status and told.err):
            silent.append(bit)
        kept += len(told.out.splitlines()) > 0.5 * len(whole.splitlines())
    assert not silent, silent
    assert kept > 30, "the undamaged part is shown"


def test_a_recording_that_ends_too_early_is_reported(
    capsys: Said, monkeypatch: pytest.MonkeyPatch, damaged: Path
) -> None:
    monkeypatch.setenv("COCKPIT_RUNS", str(damaged))
    with closing(sqlite3.connect(damaged / "r-1" / "run.db", isolation_level=None)) as db:
        db.execute("DELETE FROM feed WHERE id = (SELECT MAX(id) FROM feed)")
    assert run(["log", "r-1"]) == 0
    assert "before the end of the run" in capsys.readouterr().err


def test_a_journal_and_a_recording_may_lag_behind_each_other(
    capsys: Said, monkeypatch: pytest.MonkeyPatch, damaged: Path
) -> None:
    monkeypatch.setenv("COCKPIT_RUNS", str(damaged))
    journal = Journal(damaged / "r-1" / "commands.db")
    changes: Changes = {"micro_batches": 8}
    behind = CommandState("c", 1, "applied", changes, {"micro_batches": 4}, "ada", 9.0, 1, 2, applied_step=20)
    left = CommandState("left", 2, "accepted", changes, {}, "ada", 9.5, 0, 2)
    for state in (behind, left):
        journal.insert(Entry(state))
    journal.close()
    log = said(capsys, "log", "r-1")
    assert "applied 2/2" in log and "applied 1/2" not in log
    assert "accepted · revision 2 · the hub was killed before the change or trial was decided" in log


def test_an_empty_variable_means_the_default_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COCKPIT_RUNS", "")
    assert runs_dir() == Path("runs")
