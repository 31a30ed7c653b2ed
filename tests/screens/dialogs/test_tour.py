"""The tour: it is shown once to each user, and any key closes it."""

from pathlib import Path

from cockpit.tui.dialogs.tour import SEEN, Tour, is_first_time
from cockpit.tui.screens.run_screen import RunScreen
from tests.screens.conftest import MakeCockpit
from tests.screens.driver import screen_text, settle


async def test_any_key_closes_it_and_does_nothing_else(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(80, 24)) as pilot:
        await settle(cockpit, pilot)
        tour = Tour()
        cockpit.app.push_screen(tour)
        await settle(cockpit, pilot)
        assert "Welcome to the cockpit" in screen_text(cockpit) and "an undo" in screen_text(cockpit)
        await pilot.press("q")
        tour.on_click()  # at the same time as the key; one of them closes it
        await settle(cockpit, pilot)
        assert isinstance(cockpit.app.screen, RunScreen) and cockpit.app.is_running


def test_it_is_shown_once(tmp_path: Path) -> None:
    assert is_first_time(tmp_path / "state") and not is_first_time(tmp_path / "state")
    assert (tmp_path / "state" / SEEN).exists()
    (tmp_path / "file").touch()
    assert not is_first_time(tmp_path / "file"), "the tour is not shown if it cannot be marked as seen"
