"""The overview screen: its keys, and what it shows as updates of a scripted run arrive."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs
from textual.drivers.headless_driver import HeadlessDriver
from textual.renderables.background_screen import BackgroundScreen
from textual.visual import RichVisual, Visual

from agents.protocol import Alert, Event, Experts, Gone, Hello, Peers, Pulse, Summary, Update
from cockpit.tui.dialogs.board import BoardScreen
from cockpit.tui.dialogs.dialog import Backdrop
from cockpit.tui.dialogs.help import Help
from cockpit.tui.palette import commands
from cockpit.tui.screens.overview import Overview
from cockpit.tui.widgets.panel import Panel
from cockpit.tui.widgets.ranks.grid import RankGrid
from tests.screens.conftest import MakeCockpit
from tests.screens.driver import press, screen_text, settle, shown
from tests.screens.fake_run import START_S, FakeRun, big
from tests.screens.sizes import SIZES


@pytest.mark.parametrize("size", SIZES)
async def test_the_status_lines_show_the_state_of_the_run(
    make_cockpit: MakeCockpit, size: tuple[int, int]
) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=size) as pilot:
        await settle(cockpit, pilot)
        first, second, *rest = shown(cockpit.app)
        assert first.startswith(" ✓ LIVE · demo · 160/300 steps")
        assert second.startswith(" ! 8 ranks share 2 cores")
        assert any("r7" in line for line in rest)


@pytest.mark.parametrize("size", SIZES)
async def test_1024_ranks_fit(make_cockpit: MakeCockpit, size: tuple[int, int]) -> None:
    cockpit = make_cockpit(big(), steps=10, change_at=None)
    async with cockpit.app.run_test(size=size) as pilot:
        await settle(cockpit, pilot)
        lines = shown(cockpit.app)
        assert "1024/1024" in lines[0]
        assert any("pp4" in line and "!" in line for line in lines[2:])


async def test_a_single_rank_is_not_compared(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(FakeRun(pp=1, dp=1, tp=1, ep=1), steps=10, change_at=None)
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await settle(cockpit, pilot)
        assert "pid 4000" in screen_text(cockpit) and "vs. " not in screen_text(cockpit)


class Foreign(FakeRun):
    """A run without experts and without measured traffic."""

    def begin(self) -> Iterator[Update]:
        for update in super().begin():
            yield structs.replace(update, facts={}) if isinstance(update, Hello) else update

    def step(self, step: int) -> Iterator[Update]:
        for update in super().step(step):
            if isinstance(update, Summary):
                yield structs.replace(update, comm={})
            elif not isinstance(update, Experts | Peers):
                yield update


@pytest.mark.parametrize("size", SIZES)
async def test_a_run_without_experts_and_traffic_has_no_panels_for_them(
    make_cockpit: MakeCockpit, size: tuple[int, int]
) -> None:
    cockpit = make_cockpit(Foreign(), steps=10, change_at=None)
    async with cockpit.app.run_test(size=size) as pilot:
        for _ in range(5):
            await press(cockpit, pilot, "tab")
            text = screen_text(cockpit)
            assert "no experts" not in text and "no traffic" not in text


async def test_metric_and_group_keys(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await settle(cockpit, pilot)
        grid = cockpit.app.screen.query_one(RankGrid)
        titles = [str(grid.border_title)]
        for key in "m", "g", "g", "g":
            await pilot.press(key)
            titles.append(str(grid.border_title))
        assert titles == [
            "Ranks · own time, ms · by pp",
            "Ranks · step time, ms · by pp",
            "Ranks · step time, ms · by dp",
            "Ranks · step time, ms · by tp",
            "Ranks · step time, ms · by ep",
        ]


async def test_curves_show_fewer_steps_and_all_again(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(200, 60)) as pilot:
        await settle(cockpit, pilot)
        cockpit.app.screen.query_one("#loss").focus()
        views = []
        for key in "up", "left", "up", "0", "down":
            await pilot.press(key)
            views.append(cockpit.app.store.curve_view.steps)
        assert views == [(79, 159), (59, 139), (79, 119), None, None], "the newest step stays in view"
        await pilot.press("up")
        await settle(cockpit, pilot)
        await settle(cockpit, pilot)
        assert sum("└79" in line for line in shown(cockpit.app)) == 2, "all curves show the same steps"


async def test_the_terminal_shows_each_cursor_move(make_cockpit: MakeCockpit) -> None:
    """Only changed lines are painted, so the test checks after each key that the terminal shows what the panel drew."""
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await settle(cockpit, pilot)
        grid = cockpit.app.screen.query_one(RankGrid)
        for key, rank in (("right", 1), ("down", 3), ("j", 5), ("h", 4), ("K", 2)):
            await pilot.press(key)
            await pilot.pause()
            assert grid.selection.rank == rank
            left, top = grid.content_region.x, grid.content_region.y
            lines = shown(cockpit.app)
            for y in range(grid.content_size.height):
                assert lines[top + y][left : left + grid.content_size.width] == grid.render_line(y).text
        assert any("pp0 dp1 tp0 ep2 · node0" in line for line in shown(cockpit.app))


async def test_a_click_chooses_a_rank(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await settle(cockpit, pilot)
        await pilot.click("#ranks", offset=(38, 3))
        assert cockpit.app.screen.query_one(RankGrid).selection.rank == 3


async def test_tab_shows_every_panel_of_a_small_terminal(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(80, 24)) as pilot:
        await settle(cockpit, pilot)
        seen = []
        for _ in range(8):
            await settle(cockpit, pilot)
            visible = [panel for panel in cockpit.app.screen.query(Panel) if panel.region.area]
            assert len(visible) == 1
            assert visible[0].region.height == 24 - 4  # without two status lines, tabs and footer
            seen.append(visible[0].id)
            await pilot.press("tab")
        assert seen == ["ranks", "experts", "traffic", "events", "pipeline", "loss", "throughput", "knobs"]


async def test_zoom_and_back(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await settle(cockpit, pilot)
        await pilot.press("tab", "z")
        await settle(cockpit, pilot)
        visible = [panel.id for panel in cockpit.app.screen.query(Panel) if panel.region.area]
        assert visible == ["experts"]
        await pilot.press("escape")
        await settle(cockpit, pilot)
        assert len([panel for panel in cockpit.app.screen.query(Panel) if panel.region.area]) == 6


async def test_a_lost_layout_request_is_repeated(
    make_cockpit: MakeCockpit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, Textual may drop a layout request while the app starts. If the request were not repeated, the
    panels would keep their initial height."""
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await settle(cockpit, pilot)
        grid = cockpit.app.screen.query_one(RankGrid)
        grid._layout_required = True  # simulates a pending layout request, so Textual drops the next one
        monkeypatch.setattr(RankGrid, "natural_height", lambda _grid, _store: 14)
        grid.action_metric()
        await settle(cockpit, pilot)
        assert grid.size.height == 14


async def test_stale_and_back(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await settle(cockpit, pilot)
        cockpit.clock.now += 12
        await settle(cockpit, pilot)
        lines = shown(cockpit.app)
        assert lines[0].startswith(" ! STALE 12 s · demo · 160/300 steps")
        assert "r7" in "".join(lines)  # the last known state stays on the screen
        cockpit.source.send(cockpit.run.step(160))
        await settle(cockpit, pilot)
        assert shown(cockpit.app)[0].startswith(" ✓ LIVE · demo · 161/300 steps")


async def test_ended_lost_and_stalled(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        text = "the run is stuck at step 159; rank 4 (pp1 dp0 tp0 ep0) not arrived: in pp recv, micro-batch 3"
        stall = Alert("stall", "run", "error", True, 159, 0.0, text, {}, [4])
        cockpit.source.send(iter([Pulse(4, 159, "pp recv, micro-batch 3", 20_000.0), stall]))
        await settle(cockpit, pilot)
        lines = shown(cockpit.app)
        assert lines[0].startswith(" ✗ STALLED") and lines[1].startswith(f" ✗ {text}")
        assert any("r4" in line and "!" in line for line in lines[2:])
        cockpit.source.send(iter([Gone(4, clean=False, text="killed by signal 9", process="ended")]))
        await settle(cockpit, pilot)
        lines = shown(cockpit.app)
        assert lines[1].startswith(" ✗ rank 4 (pp1 dp0 tp0 ep0) lost: killed by signal 9")
        assert any("r4 ····" in line and "· ✗" in line for line in lines[2:])
        cockpit.source.send(Gone(rank, clean=True) for rank in range(8))
        await settle(cockpit, pilot)
        assert shown(cockpit.app)[0].startswith(" ✓ ENDED")


async def test_space_freezes_the_screen(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await settle(cockpit, pilot)
        await pilot.press("space")
        cockpit.source.send(cockpit.run.step(160))
        await settle(cockpit, pilot)
        assert shown(cockpit.app)[0].startswith(" ! FROZEN 0.0 s · demo · 160/300 steps")
        await pilot.press("m")  # keys that only change the display still work
        assert "step time" in str(cockpit.app.screen.query_one(RankGrid).border_title)
        await pilot.press("space")
        await settle(cockpit, pilot)
        assert shown(cockpit.app)[0].startswith(" ✓ LIVE · demo · 161/300 steps")


async def test_save_theme_help_and_palette(
    make_cockpit: MakeCockpit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await settle(cockpit, pilot)
        await pilot.press("s")
        assert (tmp_path / "cockpit-demo-step159.svg").read_text().startswith("<svg")
        await pilot.press("t")
        assert cockpit.app.theme == "cockpit-light"
        await pilot.press("question_mark")
        assert isinstance(cockpit.app.screen, Help)
        assert any("One cell per rank" in line for line in shown(cockpit.app))
        await pilot.press("escape")
        assert isinstance(cockpit.app.screen, Overview)
        names = {command.title for command in commands(cockpit.app, cockpit.app.screen)}
        assert {"Knobs", "Theme", "Zoom", "Ranks: metric"} <= names
        await pilot.press("q")
    assert cockpit.source.stopped


async def test_keys_are_remapped_by_id(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    cockpit.app.set_keymap({"app.knobs": "b"})
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await settle(cockpit, pilot)
        await pilot.press("k")
        assert isinstance(cockpit.app.screen, Overview)
        await pilot.press("b")
        assert isinstance(cockpit.app.screen, BoardScreen)


@pytest.mark.parametrize("size", [(20, 6), pytest.param((40, 10), marks=pytest.mark.exhaustive), (1, 1)])
async def test_a_tiny_terminal_is_supported(make_cockpit: MakeCockpit, size: tuple[int, int]) -> None:
    cockpit = make_cockpit(big(), steps=2, change_at=None)
    async with cockpit.app.run_test(size=size) as pilot:
        for _ in range(8):
            await settle(cockpit, pilot)
            await pilot.press("tab")


async def test_screens_before_the_first_update(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(steps=0)
    cockpit.source.story = iter(())
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await settle(cockpit, pilot)
        assert "WAITING" in shown(cockpit.app)[0]
        await pilot.press("m", "g", "right", "k", "right", "enter")


async def test_ctrl_z_suspends_from_any_screen(
    make_cockpit: MakeCockpit, monkeypatch: pytest.MonkeyPatch
) -> None:
    cockpit = make_cockpit()
    signals: list[tuple[int, int]] = []
    monkeypatch.setattr("cockpit.tui.terminal.terminal_app.os.killpg", lambda *sent: signals.append(sent))
    async with cockpit.app.run_test(notifications=True, size=(80, 24)) as pilot:
        await pilot.press("ctrl+z")
        await settle(cockpit, pilot)
        assert "no job control" in screen_text(cockpit)
        monkeypatch.setattr(HeadlessDriver, "can_suspend", True)
        await pilot.press("ctrl+z", "k", "ctrl+z", "question_mark", "ctrl+z")
    assert signals == [(0, signal.SIGTSTP)] * 3


@pytest.mark.parametrize(("width", "without"), [(80, []), (60, ["group"]), (24, ["zoom", "panel", "freeze"])])
async def test_the_footer_keeps_help_and_quit(
    make_cockpit: MakeCockpit, width: int, without: list[str]
) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(width, 20)) as pilot:
        await settle(cockpit, pilot)
        footer = shown(cockpit.app)[-1]
        assert "q quit" in footer and "? help" in footer
        assert not any(word in footer for word in without)
        assert len(footer.rstrip()) <= width and not footer.rstrip().endswith("…")


async def test_u_names_the_change_that_undo_would_revert(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(80, 24)) as pilot:
        await settle(cockpit, pilot)
        await pilot.press("u")
        await settle(cockpit, pilot)
        assert "press again to revert revision 1" in "".join(shown(cockpit.app))
        assert cockpit.source.requests == []


async def test_every_panel_shows_the_selected_step_or_says_that_it_does_not(
    make_cockpit: MakeCockpit,
) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(200, 60)) as pilot:
        await settle(cockpit, pilot)

        def titles() -> dict[str, str]:
            panels = cockpit.app.screen.query(Panel)
            return {panel.id or "": f"{panel.border_title} | {panel.border_subtitle}" for panel in panels}

        newest = titles()
        step = cockpit.store.timelines.steps[-3]
        cockpit.app.action_go(step, None, "overview")
        await settle(cockpit, pilot)
        at = titles()
        for name in ("ranks", "experts", "traffic", "pipeline", "loss", "throughput"):
            assert f"step {step}" in at[name] and f"step {step}" not in newest[name], at
        assert "newest" in at["events"] and at["knobs"].partition(" |")[0].endswith("· now")
        summary = next(one for one in cockpit.store.state.summaries if one.step == step)
        assert f"Loss · {summary.loss:.3f}" in at["loss"]
        window = max(one.window_ms for one in cockpit.store.timelines.at(step).values())
        assert f"{window:.0f} ms" in screen_text(cockpit)
        other = next(one for one in range(step, 0, -1) if one not in cockpit.store.timelines.steps)
        cockpit.app.action_go(other, None, "overview")
        await settle(cockpit, pilot)
        assert f"no timeline of step {other} is kept, the nearest: " in screen_text(cockpit)
        assert f"step {other} is not kept" in titles()["pipeline"]


async def test_a_dialog_tints_the_screen_below_as_textual_does(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "question_mark")
        below, dialog = cockpit.app.screen_stack[-2:]
        width, height = dialog.size
        colour = dialog.styles.background
        pictures = []
        for one in (Backdrop(below, colour), RichVisual(dialog, BackgroundScreen(below, colour))):
            strips = Visual.to_strips(dialog, one, width, height, dialog.visual_style)
            pictures.append([list(strip.simplify()) for strip in strips])
        assert colour.a < 1 and len(pictures[0]) == height
        assert pictures[0] == pictures[1]


async def test_a_long_event_is_wrapped_and_not_cut(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(FakeRun(), steps=20, change_at=None)
    text = "rank 2 (dp2) has an own time of 152 ms a step, +19 % against the 3 ranks with the same work; the last word"
    async with cockpit.app.run_test(size=(200, 60)) as pilot:
        await settle(cockpit, pilot)
        cockpit.source.send(iter([Event(START_S + 30, "warning", "hub", text)]))
        await settle(cockpit, pilot)
        lines = shown(cockpit.app)
        first = next(n for n, line in enumerate(lines) if "has an own time of 152 ms" in line)
        assert "last word" not in lines[first] and "last word · hub" in lines[first + 1]
