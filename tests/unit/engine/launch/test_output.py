"""Tests of the lines that `engine run` prints, and of the layout that it writes to the run's folder."""

import json
from pathlib import Path

import pytest
from msgspec import structs

from agents.protocol import Summary
from engine.config.toml import LAYOUT_FILE, from_toml, load, to_toml, write_layout
from engine.launch.output import Output
from tests.screens.fake_run import FakeRun
from tests.unit.engine.config.test_layout import DEMO


def test_the_first_line_has_the_grid(capsys: pytest.CaptureFixture[str]) -> None:
    layout = load(DEMO)
    Output(layout, as_json=False).start("demo-1")
    assert "demo-1: 8 ranks, pp=2 x dp_shard=2 x tp=2 x ep=4, 1f1b" in capsys.readouterr().out
    Output(layout, as_json=True).start("demo-1")
    event = json.loads(capsys.readouterr().out)
    assert (event["world"], event["grid"]["pp"], event["grid"]["cp"]) == (8, 2, 1)


def test_first_and_last_lines_have_the_run_and_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "demo-1"
    folder.mkdir()
    copied: list[Path] = []
    output = Output(load(DEMO), as_json=False, copy_to=copied.append)
    output.begin(folder)
    output.start("demo-1")
    output.end(0)
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("demo-1: 8 ranks") and last.endswith(f"; run demo-1 in {folder}")
    assert copied == [folder]
    output = Output(load(DEMO), as_json=True)
    output.begin(folder)
    output.start("demo-1")
    output.end(0)
    for line in capsys.readouterr().out.splitlines():
        event = json.loads(line)
        assert (event["run"], event["folder"]) == ("demo-1", str(folder)), event["event"]


@pytest.mark.parametrize("layout", sorted(DEMO.parent.glob("*.toml")), ids=lambda path: path.stem)
def test_the_runs_folder_has_the_complete_layout(layout: Path, tmp_path: Path) -> None:
    given = load(layout, ["train.steps=7", 'data.source="text:/a \\"b\\" \\u007f ä/*"', "train.lr=1e-7"])
    write_layout(given, tmp_path)
    assert load(tmp_path / LAYOUT_FILE) == from_toml(to_toml(given)) == given


def test_a_layout_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_layout(load(DEMO), tmp_path / "absent")
    assert f"cannot write {tmp_path / 'absent' / LAYOUT_FILE}: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(("sent", "shown"), [(8_262_779, "7.88 MiB"), (3_670_002 << 20, "3.50 TiB")])
def test_the_columns_of_small_and_large_runs_are_aligned(
    capsys: pytest.CaptureFixture[str], sent: int, shown: str
) -> None:
    output = Output(load(DEMO), as_json=False)
    output.start("demo-1")
    run = FakeRun()
    summary = next(one for one in run.story(1) if isinstance(one, Summary))
    output.step(structs.replace(summary, a2a_bytes=sent, tokens_per_s=7_221_342.0, step_ms=1163.0))
    head, row = capsys.readouterr().out.splitlines()[-2:]
    assert len(head) == len(row) and shown in row and "1,163 7,221,342" in row
    assert row.index(shown) + len(shown) == head.index("all-to-all") + len("all-to-all")
