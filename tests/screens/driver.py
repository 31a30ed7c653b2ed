"""Drive a cockpit in a test: press keys, wait until the screen is drawn, read its text."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from textual.app import App
from textual.pilot import Pilot

from cockpit.tui.widgets.panel import Panel
from tests.screens.conftest import Cockpit

DEADLINE_S = 30.0
# the screen is settled after this many equal readings, because a footer or a layout may need another round of messages
STABLE = 3
REFRESHES = 3  # each panel redraws within this many refreshes (`Panel.EVERY`)


def shown(app: App[None]) -> list[str]:
    """The text on the terminal, line by line."""
    return [strip.text for strip in app.screen._compositor.render_strips()]


def screen_text(cockpit: Cockpit) -> str:
    return "\n".join(shown(cockpit.app))


async def settle(cockpit: Cockpit, pilot: Pilot[None]) -> None:
    """Refresh from the store until all messages are processed and the screen no longer changes."""
    deadline = time.monotonic() + DEADLINE_S
    before: list[str] = []
    equal = 0
    while equal < STABLE and time.monotonic() < deadline and not cockpit.app._exit:
        for _ in range(REFRESHES):
            cockpit.app.refresh_from_store()
        await pilot.pause(0)  # returns when each widget has processed its messages
        now = shown(cockpit.app)
        equal = equal + 1 if now == before and not _pending(cockpit.app) else 0
        before = now


def _pending(app: App[None]) -> bool:
    """Whether Textual still has a layout, a repaint or a callback pending."""
    screen = app.screen
    if not screen.is_mounted or screen._layout_required or screen._dirty_widgets or screen._callbacks:
        return True
    return any(panel._layout_required for panel in screen.query(Panel))


async def press(cockpit: Cockpit, pilot: Pilot[None], *keys: str) -> None:
    """Wait until the screen shows the current store, press the keys one by one, and wait again."""
    await settle(cockpit, pilot)
    for key in keys:
        await pilot.press(key)
        cockpit.app.refresh_from_store()
    await settle(cockpit, pilot)


async def until(app: Any, pilot: Pilot[None], true: Callable[[], object]) -> None:
    """Refresh until `true()`."""
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, shown(app)[:3]
        app.refresh_from_store()
        await pilot.pause(0)
        await asyncio.sleep(0.01)
