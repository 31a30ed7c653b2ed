"""The eight screens: keys 1 to 8, Enter and Escape, at every size."""

import pytest

from cockpit.tui.dialogs.board import BoardScreen
from cockpit.tui.drawing.themes import Depth
from cockpit.tui.keys.general_bindings import SCREENS
from cockpit.tui.screens.run_screen import RunScreen
from cockpit.tui.screens.screens import RUN_SCREENS
from cockpit.tui.widgets.panel import Panel
from tests.screens.conftest import Cockpit, MakeCockpit
from tests.screens.driver import press, settle, shown
from tests.screens.sizes import SIZES


def name_of(cockpit: Cockpit) -> str:
    screen = cockpit.app.screen
    assert isinstance(screen, RunScreen)
    return screen.NAME


def test_every_key_has_a_screen() -> None:
    assert [screen.id for screen in SCREENS] == [f"screen.{name}" for name in RUN_SCREENS]
    assert [screen.keys for screen in SCREENS] == list("12345678")


@pytest.mark.parametrize("size", SIZES)
async def test_the_keys_open_the_same_screens_at_every_size(
    make_cockpit: MakeCockpit, size: tuple[int, int]
) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=size) as pilot:
        for screen in SCREENS:
            await press(cockpit, pilot, screen.keys)
            assert f"screen.{name_of(cockpit)}" == screen.id
            assert cockpit.source.samples == RUN_SCREENS[name_of(cockpit)].SAMPLES
            lines = shown(cockpit.app)
            assert "LIVE" in lines[0] and "8 ranks share 2 cores" in lines[1]
            assert all(f" {other.keys} {other.label} " in lines[-2] for other in SCREENS)
            panels = [panel for panel in cockpit.app.screen.query(Panel) if panel.region.area]
            assert panels and all(panel.drawn for panel in panels)


async def test_enter_opens_the_details_and_escape_returns(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "right", "enter")
        assert name_of(cockpit) == "ranks" and cockpit.app.session.selection.rank == 1
        await press(cockpit, pilot, "5", "escape")
        assert name_of(cockpit) == "ranks"
        await press(cockpit, pilot, "escape")
        assert name_of(cockpit) == "overview"
        await press(cockpit, pilot, "escape")
        assert name_of(cockpit) == "overview"


async def test_the_keys_of_screens_do_nothing_behind_a_dialog(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "k", "3")
        assert isinstance(cockpit.app.screen, BoardScreen)
        await press(cockpit, pilot, "escape", "escape")
        assert name_of(cockpit) == "overview"


async def test_a_click_on_a_tab_opens_its_screen(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await settle(cockpit, pilot)
        await pilot.click("#tabs", offset=(shown(cockpit.app)[-2].index("Traffic"), 0))
        await settle(cockpit, pilot)
        assert name_of(cockpit) == "traffic"


async def test_the_state_of_the_run_stays_visible_on_a_tiny_terminal(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(20, 4)) as pilot:
        for screen in SCREENS:
            await press(cockpit, pilot, screen.keys)
            assert "LIVE" in shown(cockpit.app)[0], name_of(cockpit)


@pytest.mark.parametrize(("value", "colours"), [("", Depth.FULL), ("0", Depth.NONE), (None, Depth.FULL)])
async def test_an_empty_no_color_leaves_the_colours(
    make_cockpit: MakeCockpit, monkeypatch: pytest.MonkeyPatch, value: str | None, colours: Depth
) -> None:
    """The cockpit ignores an empty NO_COLOR. Textual alone would treat it as set, and show shades of grey."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    if value is not None:
        monkeypatch.setenv("NO_COLOR", value)
    app = make_cockpit().app
    assert app.depth is colours and app.no_color == (colours is Depth.NONE)
