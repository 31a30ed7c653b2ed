"""Every key of every screen and dialog, at each size and with each number of colours.

On each panel and in each dialog, the test presses all active key bindings: those in the tables of `cockpit.tui.keys`,
and Textual's own.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from textual.binding import ActiveBinding
from textual.pilot import Pilot
from textual.screen import Screen

from agents.hub.recorder import Limits, Recorder
from agents.hub.telemetry.update_log import UpdateLog
from cockpit.tui.dialogs.help import Help
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.keys.all_bindings import BY_ID
from cockpit.tui.keys.general_bindings import PANELS, SCREENS
from cockpit.tui.screens.run_screen import RunScreen
from cockpit.tui.widgets.log.listing import ListPanel
from cockpit.tui.widgets.panel import Panel
from tests.screens.conftest import Cockpit, MakeCockpit
from tests.screens.driver import REFRESHES, settle
from tests.screens.fake_run import FakeRun
from tests.screens.faults import MODES, Colours, CutLines, picture_faults
from tests.screens.planned_run import PlannedRun
from tests.screens.sizes import LARGEST, MIDDLE, SMALLEST

TELLING = {(SMALLEST, "truecolor", "screen.plan"), (MIDDLE, "16", "screen.overview")}
"""The cases that each test run includes. `make test-all` runs all of them."""
CASES = [
    pytest.param(
        size,
        colours,
        screen.id,
        id=f"{size[0]}x{size[1]}-{colours.name}-{screen.label}",
        marks=() if (size, colours.name, screen.id) in TELLING else pytest.mark.exhaustive,
    )
    for size in (SMALLEST, MIDDLE, LARGEST)
    for colours in MODES
    for screen in SCREENS
]
CUTS = {"events"}  # panels that show the beginnings of long lines; lists show the rest with `w`
PATIENCE, PAUSE_S = 50, 0.02  # how often a faulty picture is looked at again, and the pause in between
CLOSES = 4  # how often escape is pressed, at most, to return to a screen


def story() -> FakeRun:
    return FakeRun(spike=(15, 6), straggler_alert=True, dead={(2, 5): 8}, hot={(0, 3): 12})


class Walk:
    """Presses keys, and collects the faults that it finds in the drawn screens."""

    def __init__(self, cockpit: Cockpit, pilot: Pilot[None], colours: Colours, cut: CutLines) -> None:
        self.cockpit, self.app, self.pilot, self.colours, self.cut = cockpit, cockpit.app, pilot, colours, cut
        self.pressed: set[str] = set()  # ids of the bindings, or keys of those without an id
        self.faults: dict[str, str] = {}  # what is wrong, and where it was seen first

    async def press(self, key: str, where: str) -> None:
        self.cut.take()
        await self.pilot.press(key)
        for _ in range(REFRESHES):  # the later ones draw what the first one has laid out
            self.app.refresh_from_store()
            await self.pilot.pause(0)
        found = [*picture_faults(self.app, self.colours)]
        for _ in range(PATIENCE):  # a new screen gets the height of its status lines when Textual is idle
            if not found:
                break
            await asyncio.sleep(PAUSE_S)
            self.app.refresh_from_store()
            await self.pilot.pause(0)
            found = [*picture_faults(self.app, self.colours)]
        if not self._lists():
            found += [f"cut: {line!r}" for line in self.cut.take()]
        for fault in found:
            self.faults.setdefault(fault, f"{where} · {key}")

    def _lists(self) -> bool:
        """Whether the screen shows a panel that is allowed to truncate long lines."""
        return any(
            panel.is_on_screen and (isinstance(panel, ListPanel) or panel.id in CUTS)
            for panel in self.app.screen.query(Panel)
        )

    def keys(self, of: Screen[Any] | None = None) -> Iterator[str]:
        """The active keys. If a screen is given as `of`, only the keys that this screen and its widgets bind."""
        for key, active in list(self.app.screen.active_bindings.items()):
            if of is None or (active.node is not self.app and active.node.screen is of):
                self.pressed.add(active.binding.id or key)
                yield key

    async def every_panel(self, screen: RunScreen, name: str) -> None:
        for number, panel in enumerate(screen._reachable()):
            await self.to_panel(name, panel)
            if self.app.focused is not screen._panels[panel]:
                continue  # the panel is hidden, because it has nothing to show
            self.check_table(screen._panels[panel])
            for key in self.keys(None if number == 0 else screen):
                await self.press(key, f"{name} {panel}")
                await self.every_dialog_key(f"{name} {panel}", key)
                await self.to_panel(name, panel)

    def check_table(self, panel: Panel) -> None:
        """Check that the keys that work are exactly those that the help lists."""
        tables = (*panel.ACTIONS, *PANELS, *SCREENS, *self.app.ACTIONS)
        listed = {action.id for action in tables}
        bound: dict[str, ActiveBinding] = {
            one.binding.id: one
            for one in self.app.screen.active_bindings.values()
            if one.binding.id in BY_ID and one.binding.id
        }
        if unlisted := set(bound) - listed:
            self.faults[f"{unlisted} work, and are not in the help"] = panel.id or ""
        taken = {key for action in panel.ACTIONS for key in action.keys.split(",")}
        for action in tables:
            if action.id not in bound and not set(action.keys.split(",")) <= taken:
                self.faults[f"{action.id} is in the help, and does not work"] = panel.id or ""

    async def every_dialog_key(self, where: str, opener: str) -> None:
        """If the key `opener` has opened a dialog, press all keys of the dialog. After each key that closes the dialog,
        open it again."""
        dialog = self.app.screen
        if isinstance(dialog, RunScreen):
            return
        name = type(dialog).__name__
        if name in self.pressed:
            return
        self.pressed.add(name)
        for key in list(self.keys(dialog)):
            await self.press(key, f"{where} · {opener}")
            if type(self.app.screen).__name__ != name:
                await self.close_dialogs()
                await self.press(opener, where)
                if type(self.app.screen).__name__ != name:
                    return  # the key has changed what `opener` does
        await self.close_dialogs()

    async def close_dialogs(self) -> None:
        for _ in range(CLOSES):
            if not isinstance(self.app.screen, RunScreen):
                await self.pilot.press("escape")
                await self.pilot.pause(0)
        assert isinstance(self.app.screen, RunScreen), type(self.app.screen).__name__

    async def to_panel(self, name: str, panel: str) -> None:
        """Show a panel of a screen in its initial state: nothing is frozen, zoomed, filtered or selected."""
        await self.close_dialogs()
        if self.app.shown is not self.app.store:
            self.app.action_freeze()
        self.app.clear_notifications()
        self.app.session.selection.filter = self.app.session.selection.step = None
        self.colours.show(self.app)
        await self.app.action_screen(name.removeprefix("screen."))
        screen = self.app.screen
        assert isinstance(screen, RunScreen)
        screen._zoomed = False
        screen.show_panel(panel)
        await self.pilot.pause(0)


async def no_wait(seconds: float) -> None:
    """Replaces Textual's function that waits until the process is idle, because this wait takes most of the time of a
    key press. Instead, `Walk` itself waits until all widgets have processed their messages."""
    await asyncio.sleep(0)


def record(folder: Path) -> None:
    """A recorded run, for the list of runs."""
    folder.mkdir(parents=True)
    log = UpdateLog()
    recorder = Recorder(folder / "run.db", log, Limits())
    for update in story().story(5):
        log.publish(update)
    recorder.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("size", "colours", "name"), CASES)
async def test_every_key(
    make_cockpit: MakeCockpit,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    size: tuple[int, int],
    colours: Colours,
    name: str,
) -> None:
    run = PlannedRun(
        folder=tmp_path, **{key: value for key, value in vars(story()).items() if key != "oversubscribed"}
    )
    record(tmp_path / "runs" / "yesterday")
    monkeypatch.setenv("COCKPIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("NO_COLOR", raising=False)
    if colours.name == "none":
        monkeypatch.setenv("NO_COLOR", "1")
    cut = CutLines()
    monkeypatch.setattr("textual.app.wait_for_idle", no_wait)
    monkeypatch.setattr(StripLine, "strip", lambda line, width, style: cut.strip(line, width, style))
    cockpit = make_cockpit(run, steps=30, change_at=20)
    cockpit.source.owns_run = True  # quitting asks first
    exits: list[object] = []
    monkeypatch.setattr(cockpit.app, "exit", lambda *args, **kwargs: exits.append(args))
    async with cockpit.app.run_test(size=size) as pilot:
        monkeypatch.chdir(tmp_path)  # screenshots
        colours.show(cockpit.app)
        await settle(cockpit, pilot)
        walk = Walk(cockpit, pilot, colours, cut)
        await cockpit.app.action_screen(name.removeprefix("screen."))
        await settle(cockpit, pilot)
        screen = cockpit.app.screen
        assert isinstance(screen, RunScreen)
        await walk.every_panel(screen, name)
        assert not walk.faults, "\n".join(f"{where}: {fault}" for fault, where in walk.faults.items())
        assert {"app.quit", "app.help", "panel.zoom", *(one.id for one in SCREENS)} <= walk.pressed
        assert exits, "the dialog before the end of a run has a key that ends it"
        assert {Help.__name__, "Ending", "BoardScreen", "RunsScreen", "InfoScreen", "Prompt"} <= walk.pressed
