"""Snapshots of screens with an open dialog or prompt, and of a screen without colour."""

import pytest
from textual.pilot import Pilot

from cockpit.knobs.preview import STABLE_S
from tests.screens.conftest import MakeCockpit
from tests.screens.dialogs.test_steering import FASTER, SAME, UNKNOWN
from tests.screens.driver import settle
from tests.screens.fake_run import big
from tests.screens.sizes import PICTURES
from tests.screens.snapshots.pressing import Compare, quiet


@pytest.mark.parametrize("size", PICTURES)
def test_board(snap_compare: Compare, make_cockpit: MakeCockpit, size: tuple[int, int]) -> None:
    """The knob board with a running trial of another operator, and with an edited knob value and its preview."""
    cockpit = make_cockpit()

    async def run_before(pilot: Pilot[None]) -> None:
        await settle(cockpit, pilot)
        cockpit.source.send(iter([cockpit.run.trial("t", "after", 16, measured=12, before_ms=655.0)]))
        await settle(cockpit, pilot)  # draw the trial on the overview before the board covers it
        await pilot.press("k", "right")
        await settle(cockpit, pilot)
        cockpit.clock.now += STABLE_S
        await settle(cockpit, pilot)
        cockpit.source.answer(FASTER, SAME, UNKNOWN)
        await settle(cockpit, pilot)
        await settle(cockpit, pilot)

    assert snap_compare(cockpit.app, terminal_size=size, run_before=run_before)


@pytest.mark.parametrize("size", PICTURES)
def test_prompt(snap_compare: Compare, make_cockpit: MakeCockpit, size: tuple[int, int]) -> None:
    """A filter is applied and a step is selected while another filter is being typed."""
    cockpit = make_cockpit(steps=20, change_at=None)
    keys = (
        "slash",
        *"tp",
        "equals_sign",
        "1",
        "enter",
        "left_square_bracket",
        "slash",
        "space",
        "ampersand",
        *"ow",
    )
    assert snap_compare(cockpit.app, terminal_size=size, run_before=quiet(cockpit, *keys))


def test_1024_ranks_without_colour(
    snap_compare: Compare, make_cockpit: MakeCockpit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    cockpit = make_cockpit(big(), steps=10, change_at=None)
    assert snap_compare(cockpit.app, terminal_size=(120, 36), run_before=quiet(cockpit))
