"""The curves screen: any metric, one axis and one cursor for all charts, marks, and comparing two runs with three key
presses."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from agents.protocol import Summary, Update
from cockpit.data.curves.view import extent
from cockpit.tui.app import CockpitApp
from cockpit.tui.screens.curves import Curves
from tests.screens.conftest import Cockpit, MakeCockpit
from tests.screens.driver import press, screen_text, settle, shown, until
from tests.screens.fake_run import START_S, FakeRun
from tests.unit.cockpit.data.comparison.test_compare import LAYOUT, record


class Odd(FakeRun):
    """A run with missing steps, non-finite values, and very large and very small values."""

    def step(self, step: int) -> Iterator[Update]:
        for update in super().step(step):
            if not isinstance(update, Summary):
                yield update
            elif not 40 <= step < 60:
                size = 10.0 ** (step % 61 - 30)
                loss = math.nan if step == 20 else 1e308 if step == 30 else -size if step % 7 == 0 else size
                yield structs.replace(update, loss=loss, grad_norm=math.inf if step == 25 else 0.0, mfu=None)


def curves(cockpit: Cockpit) -> Curves:
    screen = cockpit.app.screen
    assert isinstance(screen, Curves)
    return screen


def headings(cockpit: Cockpit) -> dict[str, str]:
    """Maps the title of each chart to the value in the chart's heading."""
    found = {}
    for line in shown(cockpit.app):
        text = line[1:].lstrip(" ▸")
        for title in ("Loss", "Gradient norm", "Step time", "Throughput"):
            if text.startswith(f"{title}  "):
                found[title] = " ".join(text[len(title) :].split()[:2])
    return found


async def test_the_cursor_shows_the_values_of_all_charts_at_its_step(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "6")
        await press(cockpit, pilot, *["left"] * 70)
        step = cockpit.app.session.selection.step
        assert step is not None and step < 100
        summary = next(one for one in cockpit.store.state.summaries if one.step == step)
        found = headings(cockpit)
        assert list(found) == ["Loss", "Gradient norm", "Step time", "Throughput"]
        assert found["Loss"].startswith(f"{summary.loss:.3f}")
        assert found["Step time"].startswith(f"{summary.step_ms:.1f} ms")
        assert f"cursor at step {step}" in screen_text(cockpit)
        cockpit.app.session.selection.step = 120  # another screen selects a step
        await settle(cockpit, pilot)
        assert headings(cockpit)["Step time"].startswith(
            f"{cockpit.store.state.summaries[120].step_ms:.1f} ms"
        )
        cockpit.app.session.selection.step = 9999
        await settle(cockpit, pilot)
        assert "step 9 999 is not kept" in screen_text(cockpit) and headings(cockpit)["Loss"][0] == "·"
        await press(cockpit, pilot, "right")
        assert cockpit.app.session.selection.step is None, "past the end, the cursor follows the run"
        await press(cockpit, pilot, "up", "H", "H")
        newest = cockpit.store.state.summaries[-1]
        assert cockpit.store.curve_view.steps and cockpit.store.curve_view.steps[1] < newest.step
        assert headings(cockpit)["Step time"].startswith(f"{newest.step_ms:.1f} ms"), (
            "though it is out of view"
        )


async def test_charts_are_chosen_zoomed_and_drawn_together(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(80, 24)) as pilot:
        await press(cockpit, pilot, "6")
        assert list(headings(cockpit)) == ["Loss", "Gradient norm"]
        await press(cockpit, pilot, "m", "down", "down", "space", "enter")
        assert list(headings(cockpit)) == ["Loss", "Gradient norm", "Step time"]
        await press(cockpit, pilot, "tab", "x")
        assert list(headings(cockpit)) == ["Loss", "Step time"]
        await press(cockpit, pilot, "m", "up", "enter")  # the chosen metric replaces the current chart
        assert list(headings(cockpit)) == ["Loss", "Gradient norm"]
        assert "·  log" not in screen_text(cockpit) and " log " not in screen_text(cockpit)
        await press(cockpit, pilot, "y", "w", "w", "up", "up")
        text = screen_text(cockpit)
        assert " log" in text and "half-life 2 steps" in text and "average" in text
        assert "119 to 159 of 159" in text
        assert curves(cockpit).charts.choices.logarithmic == {"grad_norm"}
        await press(cockpit, pilot, "z")
        assert list(headings(cockpit)) == ["Gradient norm"]
        await press(cockpit, pilot, "escape", "0")
        assert list(headings(cockpit)) == ["Loss", "Gradient norm"] and cockpit.store.curve_view.steps is None


async def test_what_changed_before_the_loss_jumped(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(80, 24)) as pilot:
        await press(cockpit, pilot, "6", "e")
        text = screen_text(cockpit)
        assert "100 ◆ micro_batches 4→8 · ada@login" in text
        assert "step time 413 → 657 ms" in text and "Loss 2.8" in text
        await press(cockpit, pilot, "enter")
        assert cockpit.app.session.selection.step == 100 and "Loss" in headings(cockpit)


async def test_comparison_with_another_run(
    make_cockpit: MakeCockpit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COCKPIT_RUNS", str(tmp_path))
    record(tmp_path / "[red]yesterday", range(200), layout=LAYOUT % "x")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "run.db").write_bytes(b"no recording")
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(200, 60)) as pilot:
        comparison = cockpit.app.session.comparison
        await press(cockpit, pilot, "6", "v")
        assert "[red]yesterday" in screen_text(cockpit) and "broken" in screen_text(cockpit)
        await press(cockpit, pilot, "down", "enter")
        await until(cockpit.app, pilot, lambda: not comparison.loading)
        await settle(cockpit, pilot)
        text = screen_text(cockpit)
        assert "B [red]yesterday" in text and "last common step 159: loss 2.311 against 4.841" in text
        assert "Differences" in text and "global_batch" in text
        await pilot.resize_terminal(80, 24)  # the difference has a line of its own where it would be cut off
        await settle(cockpit, pilot)
        assert "by step · last common step 159: loss 2.311 against 4.841 (-52.3 %)" in screen_text(cockpit)
        await pilot.resize_terminal(200, 60)
        await press(cockpit, pilot, "v", "enter")
        await until(cockpit.app, pilot, lambda: not comparison.loading)
        await settle(cockpit, pilot)
        assert "cannot be read" in screen_text(cockpit) and len(comparison.others) == 1
        await press(cockpit, pilot, "b")
        assert "by tokens" in screen_text(cockpit)


@pytest.mark.parametrize("size", [(80, 24), pytest.param((200, 60), marks=pytest.mark.exhaustive), (20, 5)])
async def test_odd_values_are_drawn_or_marked(make_cockpit: MakeCockpit, size: tuple[int, int]) -> None:
    cockpit = make_cockpit(Odd(), steps=120, change_at=None)
    async with cockpit.app.run_test(size=size) as pilot:
        await press(cockpit, pilot, "6", "y", "r", "r", "w")
        text = screen_text(cockpit)
        if size[0] > 20:
            assert "✗" in text and "▲" in text and "full" in text and "log" in text
            assert "▼" in text, "a negative value has no place on a log scale"
        await press(cockpit, pilot, "y", "up", "up", "left", "H", "L", "down", "down")
        cockpit.source.send(Odd().step(70))  # the run resumed from an earlier step
        await settle(cockpit, pilot)
        assert extent(cockpit.store.state) == (0, 70) and isinstance(cockpit.app, CockpitApp)
        assert cockpit.store.fault is None and START_S


async def test_a_run_with_one_step_and_one_without_any(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(steps=0)
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "6", "left", "up", "0", "e", "escape", "m", "escape")
        assert "the curves begin with the first step" in screen_text(cockpit)
        cockpit.source.send(cockpit.run.step(0))
        await settle(cockpit, pilot)
        assert headings(cockpit)["Loss"].startswith("5.4")
