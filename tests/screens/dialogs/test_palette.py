"""The command palette: what it finds, and that it shows names from a run as plain text."""

from pathlib import Path

import pytest
from textual.command import CommandPalette

from cockpit.tui.dialogs.board import BoardScreen
from cockpit.tui.dialogs.prompt import Prompt
from cockpit.tui.dialogs.runs import RunsScreen
from cockpit.tui.palette import commands
from cockpit.tui.screens.run_screen import RunScreen
from cockpit.tui.screens.screens import PANEL_NAMES
from tests.screens.conftest import Cockpit, MakeCockpit
from tests.screens.driver import press, settle, shown, until
from tests.screens.fake_run import FakeRun
from tests.screens.hostile_run import HostileRun


async def choose(cockpit: Cockpit, title: str) -> None:
    """Run the entry of the command palette that has this title."""
    one = next(one for one in commands(cockpit.app, cockpit.app.screen) if one.title == title)
    done = one.run()
    if hasattr(done, "__await__"):
        await done


async def test_metrics_knobs_themes_marks_and_anomalies(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(FakeRun(oversubscribed=False, straggler_alert=True), steps=20, change_at=None)
    at = cockpit.app.session.selection
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await settle(cockpit, pilot)
        await choose(cockpit, "Metric: memory")
        await settle(cockpit, pilot)
        assert isinstance(cockpit.app.screen, RunScreen) and cockpit.app.screen.NAME == "ranks"
        assert at.metric == "memory" and any("memory, MiB" in line for line in shown(cockpit.app))
        cockpit.store.named_marks.set("a", 7, "odd")
        await choose(cockpit, "Mark 'a odd")
        assert at.step == 7
        await choose(cockpit, "Theme: cockpit-light")
        assert cockpit.app.theme == "cockpit-light"
        titles = [one.title for one in commands(cockpit.app, cockpit.app.screen)]
        assert any(title.startswith("Anomaly: rank 3 ") for title in titles)
        assert {"Curves screen", "Screenshot", "Go to", "Knob: lr_scale = 1", "Zoom"} <= set(titles)
        await choose(cockpit, "Knob: lr_scale = 1")
        await settle(cockpit, pilot)
        board = cockpit.app.screen
        assert isinstance(board, BoardScreen) and board.controller.edits.row == 3


async def test_each_panel_is_found(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(FakeRun(), steps=20, change_at=None)
    async with cockpit.app.run_test(size=(200, 60)) as pilot:
        await settle(cockpit, pilot)
        for name, panels in PANEL_NAMES.items():
            for id, title in panels.items():
                if id == "differences":
                    continue
                await choose(cockpit, f"Panel: {title}")
                await settle(cockpit, pilot)
                screen = cockpit.app.screen
                assert isinstance(screen, RunScreen) and name == screen.NAME
                assert screen.focused is screen.query_one(f"#{id}")
            assert name == "overview" or set(screen._reachable()) - {"other"} <= set(panels)
        await choose(cockpit, "Panel: differences of runs")
        await until(
            cockpit.app, pilot, lambda: any("no panel" in one.message for one in cockpit.app._notifications)
        )


async def test_hostile_names_are_plain_text(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(HostileRun())
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "ctrl+p")
        assert isinstance(cockpit.app.screen, CommandPalette)
        for query, name in (("attn", "Metric: attn[qkv] time"), ("click", "Knob: [@click=app.quit]lr = 1")):
            await pilot.press(*query)
            await until(
                cockpit.app, pilot, lambda name=name: any(name in line for line in shown(cockpit.app))
            )
            assert all(line.isprintable() for line in shown(cockpit.app))
            await pilot.press(*["backspace"] * len(query))


async def test_the_prompt_opens_from_the_palette(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(steps=20, change_at=None)
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "ctrl+p")
        await pilot.press(*"filter")
        await until(cockpit.app, pilot, lambda: any("Show only ranks" in line for line in shown(cockpit.app)))
        await pilot.press("enter")
        await until(cockpit.app, pilot, lambda: isinstance(cockpit.app.screen, Prompt))
        prompt = cockpit.app.screen
        assert isinstance(prompt, Prompt)
        await prompt.query("#prompt").remove()
        prompt._drawn = ()
        cockpit.app.refresh_from_store()  # an update after its widgets are removed does nothing


async def test_a_run_opens_the_list_of_runs(
    make_cockpit: MakeCockpit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first[b]x", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.db").touch()
    monkeypatch.setenv("COCKPIT_RUNS", str(tmp_path))
    cockpit = make_cockpit(steps=20, change_at=None)
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "ctrl+p")
        await pilot.press(*"first")
        await until(cockpit.app, pilot, lambda: any("Run: first[b]x" in line for line in shown(cockpit.app)))
        await pilot.press("enter")
        await until(cockpit.app, pilot, lambda: isinstance(cockpit.app.screen, RunsScreen))
        screen = cockpit.app.screen
        assert isinstance(screen, RunsScreen)
        await until(cockpit.app, pilot, lambda: screen.table.chosen)
        assert screen.table.chosen and screen.table.chosen.folder.name == "first[b]x"


async def test_the_palette_has_no_dim_text(make_cockpit: MakeCockpit) -> None:
    """The app leaves out Textual's conversion of dim text to a colour, so dim text would have an unknown contrast."""
    cockpit = make_cockpit(FakeRun(), steps=20, change_at=None)
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await settle(cockpit, pilot)
        await pilot.press("ctrl+p")
        await until(cockpit.app, pilot, lambda: any("Next anomaly" in line for line in shown(cockpit.app)))
        segments = [one for strip in cockpit.app.screen._compositor.render_strips() for one in strip]
        assert not [one.text for one in segments if one.style and one.style.dim]
