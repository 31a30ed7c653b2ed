"""Keys that arrive together: each key acts on the screen that the previous key has opened."""

import pytest
from textual import events

from cockpit.tui.keys.general_bindings import SCREENS
from cockpit.tui.widgets.panel import Panel
from tests.screens.conftest import Cockpit, MakeCockpit
from tests.screens.driver import press, settle, shown
from tests.screens.fake_run import FakeRun


def state(cockpit: Cockpit) -> object:
    """What the pressed keys have selected, and the text on the screen."""
    panels = [panel.choice() for panel in cockpit.app.screen.query(Panel) if panel.has_focus]
    return type(cockpit.app.screen).__name__, cockpit.app.session.selection, panels, shown(cockpit.app)


@pytest.mark.parametrize(
    "keys",
    [
        *("2wl", "5x", "21", "ku", "?j"),  # keys of a panel, of a screen, and of the board, and a dialog
        *(
            pytest.param(keys, marks=pytest.mark.exhaustive)
            for keys in ("2w", "3w", "4wl", "6e", "7l", "8ev", "7z", "2we", "k8")
        ),
    ],
)
async def test_keys_in_one_piece_act_as_single_keys(make_cockpit: MakeCockpit, keys: str) -> None:
    names = ["question_mark" if key == "?" else key for key in keys]
    slow = make_cockpit(FakeRun(hot={(1, 3): 20}, hot_peer=2, spike=(120, 3)))
    async with slow.app.run_test(size=(120, 36)) as pilot:
        await settle(slow, pilot)
        for name in names:
            await press(slow, pilot, name)
        expected = state(slow)
    fast = make_cockpit(FakeRun(hot={(1, 3): 20}, hot_peer=2, spike=(120, 3)))
    async with fast.app.run_test(size=(120, 36)) as pilot:
        await settle(fast, pilot)
        for name, key in zip(names, keys, strict=True):
            fast.app.post_message(events.Key(name, key))
        await settle(fast, pilot)
        assert state(fast) == expected


async def test_a_screen_that_was_opened_takes_the_next_key(make_cockpit: MakeCockpit) -> None:
    """The action that opens a screen returns only when the screen's panel has the focus and the data, so the next key
    acts on this panel."""
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await settle(cockpit, pilot)
        for screen in reversed(SCREENS):
            await cockpit.app.run_action(f"app.{screen.action}")
            focused = cockpit.app.focused
            assert isinstance(focused, Panel) and focused._store is cockpit.store, screen.label
        for action in ("app.info", "app.runs"):
            await cockpit.app.run_action(action)
            assert isinstance(cockpit.app.focused, Panel), action
            await press(cockpit, pilot, "escape")
