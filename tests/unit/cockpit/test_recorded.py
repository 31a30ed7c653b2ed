"""The headless commands on a run that is over: its recording answers."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cockpit.cli import run
from tests.unit.cockpit.conftest import STEPS

Said = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, runs: Path) -> Iterator[None]:
    monkeypatch.setenv("COCKPIT_RUNS", str(runs))
    yield


def said(capsys: Said, *words: str) -> str:
    assert run(list(words)) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_snapshot_now_and_then(capsys: Said) -> None:
    now = json.loads(said(capsys, "snapshot", "r-1", "--json"))
    assert (now["verdict"], now["link"], now["step"], now["age_s"]) == ("ENDED", "ended", STEPS - 1, None)
    then = json.loads(said(capsys, "snapshot", "--run", "r-1", "--at", "7", "--json"))
    assert (then["verdict"], then["summary"]["step"], len(then["ranks"])) == ("PLAYBACK", 7, 2)
    assert then["ranks"][1]["step"]["step"] == 7 and then["ranks"][1]["gone"] is None
    early = json.loads(said(capsys, "snapshot", "r-1", "--at", "seq:2", "--json"))
    assert (early["seq"], early["world"], early["step"], early["knobs"]) == (2, 2, None, [])
    again = json.loads(said(capsys, "snapshot", "r-1", "--at", f"{now['epoch']}:{then['seq']}", "--json"))
    assert again == then
    assert "PLAYBACK" in said(capsys, "snapshot", "r-1", "--at", "7")


def test_watch_log_and_knobs(capsys: Said) -> None:
    lines = [json.loads(line) for line in said(capsys, "watch", "r-1", "--json").splitlines()]
    assert lines[0]["kind"] == "snapshot" and lines[0]["seq"] == 0
    assert sum(line["kind"] == "summary" for line in lines) == STEPS
    assert sum(line["kind"] == "step" for line in lines) == 2 * STEPS
    assert len(said(capsys, "watch", "r-1").splitlines()) == STEPS
    log = said(capsys, "log", "r-1")
    assert "a thing to know · rank 1" in log and "micro_batches 4→8 · applied 2/2" in log
    assert json.loads(said(capsys, "knobs", "r-1", "--json"))["knobs"][0]["name"] == "micro_batches"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["snapshot", "r-1", "--at", "99"], "holds the steps 0 to 29, not 99"),
        (["snapshot", "r-1", "--at", "seq:9999"], "not 9999"),
        (["snapshot", "r-1", "--at", "abc:1"], "no hub start abc"),
        (["snapshot", "r-1", "--at", "soon"], "legal: a step such as 120"),
        (["snapshot", "bare", "--at", "1"], "there is no recording"),
        (["replay", "bare"], "there is no recording"),
        (["replay", "nowhere"], "there is no run nowhere"),
        (["replay", "r-1", "--speed", "0"], "--speed"),
    ],
)
def test_what_is_not_there_is_one_sentence(capsys: Said, words: list[str], sentence: str) -> None:
    assert run(words) == 2
    told = capsys.readouterr()
    assert sentence in told.err and told.err.count("\n") == 1 and not told.out
