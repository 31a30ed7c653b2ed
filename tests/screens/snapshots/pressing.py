"""Helpers for snapshot tests of whole screens, which fail on every visible change, so that each change is reviewed.

After an intended change, run `python -m pytest tests/screens/snapshots --snapshot-update` and look at the SVGs. Each
test module has its own folder of SVGs.
"""

from collections.abc import Awaitable, Callable

from textual.pilot import Pilot
from textual.widgets import Input

from tests.screens.conftest import Cockpit
from tests.screens.driver import settle

Compare = Callable[..., bool]


def quiet(cockpit: Cockpit, *keys: str) -> Callable[[Pilot[None]], Awaitable[None]]:
    async def run_before(pilot: Pilot[None]) -> None:
        await settle(cockpit, pilot)
        await pilot.press(*keys)
        await settle(cockpit, pilot)
        for prompt in cockpit.app.screen.query(Input):
            # on a slow machine, the picture showed the cursor or not
            prompt.cursor_blink = False
        await settle(cockpit, pilot)

    return run_before
