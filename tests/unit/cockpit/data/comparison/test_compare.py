"""Compared runs: only real differences are listed, and values of both runs are compared at the same step, number of
tokens or time."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from agents.hub.recorder import Limits, Recorder
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import Board, KnobState, Legal, Summary
from cockpit.cli.main import run as cockpit
from cockpit.data.comparison.compared_runs import (
    By,
    Progress,
    RunCurves,
    common_steps,
    differences,
    last_common,
    load_run_curves,
    own_curves,
    read_layout,
    table,
)
from cockpit.data.comparison.comparison import Comparison
from cockpit.data.sources.connection import CockpitError
from cockpit.data.store import Store
from tests.unit.agents.fleet import DEADLINE_S, make_hello, make_summary

LAYOUT = """
[model]
layers = 4
[train]
lr = 0.002
betas = [0.9, 0.95]
[run]
name = "%s"
"""

Steps = Callable[[int], Summary]


def at(step: int, lr: float = 0.002) -> Summary:
    return structs.replace(make_summary(step), loss=5.0 - step / 1000, lr=lr, time_s=1.7e9 + 2.0 * step)


def record(folder: Path, steps: range, summary: Steps = at, layout: str = "", **facts: Any) -> Path:
    """A run folder with a recording of `steps`."""
    folder.mkdir(parents=True)
    sequence = UpdateLog()
    recorder = Recorder(folder / "run.db", sequence, Limits(commit_s=0.001))
    known = {"seq_len": 128, "global_batch": 8, "data": "bytes"} | facts
    sequence.publish(structs.replace(make_hello(0, 1), facts=known))
    sequence.publish(Board(0, 1, "d", [KnobState("micro_batches", 4, Legal([4, 8]), True, "")]))
    for step in steps:
        sequence.publish(summary(step))
        if step % 100 == 0:
            recorder.follow()
    recorder.close(60)
    (folder / "layout.toml").write_text(layout or LAYOUT % folder.name)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {
        "yesterday": record(folder / "yesterday", range(3000)),
        "today": record(
            folder / "today",
            range(2501),
            lambda step: structs.replace(at(step, 0.003), loss=6.0 - step / 1000, step_ms=20.0),
            (LAYOUT % "today").replace("0.002", "0.003").replace("0.95", "0.99"),
            data="text",
            global_batch=16,
        ),
    }


def loaded(runs: Mapping[str, Path]) -> tuple[RunCurves, RunCurves]:
    return load_run_curves(runs["today"]), load_run_curves(runs["yesterday"])


def test_only_what_differs_is_listed_layout_first(runs: Mapping[str, Path]) -> None:
    one, other = loaded(runs)
    found = [(row.kind, row.key, *row.values) for row in differences(one, other)]
    assert found == [
        ("layout", "train.lr", "0.003", "0.002"),
        ("layout", "train.betas", "[0.9,0.99]", "[0.9,0.95]"),
        ("fact", "global_batch", "16", "8"),
        ("fact", "data", "text", "bytes"),
    ]
    assert differences(one, one) == []
    other.layout = {}
    assert [row.key for row in differences(one, other)] == ["global_batch", "data"], (
        "no key of one layout alone"
    )


def test_values_at_common_steps_are_exact_though_old_steps_are_in_buckets(runs: Mapping[str, Path]) -> None:
    one, other = loaded(runs)
    assert one.store.state.curve.width > 1 and last_common(one, other) == 2500
    steps = common_steps(one, other)
    assert steps == [0, 500, 1000, 1500, 2000, 2500]
    values = {(pair.metric.key, pair.step): pair.values for pair in table(one, other, [*steps, 777, 2600])}
    for step in (*steps, 777):
        assert values["loss", step] == (6.0 - step / 1000, 5.0 - step / 1000)
    assert values["loss", 2600] == (None, 2.4), "a run without this step has no value there, not its last one"


@pytest.mark.parametrize(
    ("by", "x", "steps"),
    [(By.STEP, 1200, (1200, 1200)), (By.TOKENS, 1201 * 2048, (1200, 2401)), (By.TIME, 2400.0, (1200, 1200))],
)
def test_runs_are_aligned_by_step_tokens_or_time(
    runs: Mapping[str, Path], by: By, x: float, steps: tuple[int, int]
) -> None:
    found = loaded(runs)
    # The recorder wrote all steps within a second, so take the clock of the ranks.
    for run in found:
        seconds = [2.0 * step for step in range((run.last or 0) + 1)]
        run.progress = Progress(run.progress.tokens, list(range(len(seconds))), seconds)
    assert tuple(run.progress.step(by, x) for run in found) == steps
    assert found[0].progress.x(by, 1200) == pytest.approx(x)


def test_an_unknown_place_is_none() -> None:
    progress = Progress(None, [10, 20], [0.0, 5.0])
    assert progress.x(By.TOKENS, 3) is None and progress.step(By.TOKENS, 3.0) is None
    assert (
        progress.x(By.TIME, 9) is None and progress.x(By.TIME, 21) is None and progress.x(By.TIME, 15) == 2.5
    )
    assert Progress().x(By.TIME, 0) is None


def test_the_clock_of_a_resumed_run_continues(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    store = Store()
    moments = [*range(60), *range(40, 80)]
    store.apply([make_hello(0, 1)])
    for count, step in enumerate(moments):
        store.apply([structs.replace(at(step), time_s=1e9 + count)])
    progress = own_curves(store, None, "x").progress
    assert progress.x(By.TIME, 39) == 39 and progress.x(By.TIME, 40) == 60 and progress.x(By.TIME, 79) == 99


@pytest.mark.parametrize(
    "content",
    [b"", b"SQLite format 3\x00" + bytes(900), b"not a database" * 99],
    ids=["empty", "header", "text"],
)
def test_a_damaged_recording_gives_one_sentence(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "bad"
    folder.mkdir()
    (folder / "run.db").write_bytes(content)
    with pytest.raises(CockpitError) as caught:
        load_run_curves(folder)
    assert "\n" not in str(caught.value) and "run.db" in str(caught.value)


def test_a_run_cut_anywhere_is_refused_or_read_with_its_damage_named(
    runs: Mapping[str, Path], tmp_path: Path
) -> None:
    whole = (runs["today"] / "run.db").read_bytes()
    read = 0
    for number, share in enumerate((0.2, 0.5, 0.8, 0.97)):
        folder = tmp_path / f"cut{number}"
        folder.mkdir()
        (folder / "run.db").write_bytes(whole[: int(len(whole) * share)])
        try:
            found = load_run_curves(folder)
        except CockpitError as error:
            assert "\n" not in str(error)
        else:
            read += 1
            assert found.damage or found.last == 2500
    assert read < 4


def test_a_hostile_layout_is_plain_text(tmp_path: Path) -> None:
    (tmp_path / "layout.toml").write_text('[a]\n"b\\u001b[31m" = "x\\u0007[red]"\nc = 2024-01-01\n')
    assert all(text.isprintable() for pair in read_layout(tmp_path).items() for text in pair)
    (tmp_path / "layout.toml").write_bytes(b"\xff\xfe = [")
    assert read_layout(tmp_path) == {}


def test_the_screen_reads_other_runs_in_the_background(
    runs: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COCKPIT_RUNS", str(runs["today"].parent))
    store = load_run_curves(runs["today"]).store
    comparison = Comparison()
    pause = threading.Event()

    def until(true: Callable[[], bool]) -> None:
        for _ in range(int(DEADLINE_S / 0.01)):
            if true():
                return
            pause.wait(0.01)
        raise AssertionError("the condition did not become true in time")

    comparison.add(runs["yesterday"], store, "today")
    until(lambda: not comparison.loading)
    assert [one.name for one in comparison.others] == ["yesterday"] and comparison.own
    assert comparison.own.name == "today" and comparison.differences()[0][1][0].key == "train.lr"
    comparison.show((100, 400))
    until(lambda: comparison.others[0].store.curve_view.detail is not None)
    detail = comparison.others[0].store.curve_view.detail
    assert detail and len(detail.points("loss")) == 301, "every step in view, of the other run too"
    comparison.add(tmp_path, store, "today")
    until(lambda: not comparison.loading)
    assert "does not exist" in comparison.error and len(comparison.others) == 1
    comparison.remove()
    assert not comparison.others and not comparison.error
    comparison.stop()


def test_the_command_prints_differences_and_metrics(
    runs: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COCKPIT_RUNS", str(runs["today"].parent))
    assert cockpit(["compare", "today", "yesterday"]) == 0
    text = capsys.readouterr().out
    assert "train.lr" in text and "step 2 500" in text and "model.layers" not in text
    row = next(line.split() for line in text.splitlines() if line.startswith("Loss"))
    assert row[:3] == ["Loss", "A", "6.000"] and row[-1] == "3.500"
    assert cockpit(["compare", "today", "today"]) == 2
    assert "are the same run" in capsys.readouterr().err
    assert cockpit(["compare", "today", "tomorrow"]) == 2
    assert "there is no run tomorrow" in capsys.readouterr().err
