"""The Textual application: a source fills a store with a run's data, and a timer updates the visible screens from the
store."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import ClassVar

from textual.binding import Binding
from textual.command import Provider
from textual.widget import AwaitMount

from cockpit.data.filter import vocabulary
from cockpit.data.navigation.jump import Jump
from cockpit.data.run_folders.console import Console
from cockpit.data.run_folders.next_run import NextRun
from cockpit.data.sources.source import Source
from cockpit.data.store import Store
from cockpit.tui.dialogs.board import BoardScreen
from cockpit.tui.dialogs.ending import Ending
from cockpit.tui.dialogs.help import Help
from cockpit.tui.dialogs.info import InfoScreen
from cockpit.tui.dialogs.prompt import Prompt
from cockpit.tui.dialogs.runs import RunsScreen
from cockpit.tui.dialogs.starting import Starting
from cockpit.tui.dialogs.tour import Tour, is_first_time
from cockpit.tui.drawing.themes import DEFAULT
from cockpit.tui.keys.action import Action
from cockpit.tui.keys.dialog_bindings import BOARD
from cockpit.tui.keys.general_bindings import APP, APP_KEYS, PANELS, SCREENS
from cockpit.tui.navigation import Navigator
from cockpit.tui.palette import CommandProvider
from cockpit.tui.prompt_lines import Deed, FilterLine, JumpLine, MarkLine, PromptLine
from cockpit.tui.run_exit import RunExit
from cockpit.tui.screens.run_screen import RunScreen
from cockpit.tui.screens.screens import PANEL_NAMES, RUN_SCREENS
from cockpit.tui.session import Session
from cockpit.tui.terminal.attention import Attention
from cockpit.tui.terminal.colours import depth_of
from cockpit.tui.terminal.pauses import collect_if_due, short_pauses
from cockpit.tui.terminal.terminal_app import TerminalApp
from cockpit.tui.widgets.panel import Panel

FIRST_SCREEN = "overview"
REFRESHES_PER_S = 8
LOAD_EVERY_S = 0.2  # pause between the imports of two screens that are not visible
MOST_MISSED = 2  # how many ticks in a row may be skipped while the source writes
KEY_FIRST_S = 0.1  # for this long after a key, its effect is painted before new data
PROMPT_ACTIONS = {"filter", "jump", "mark"}


class CockpitApp(TerminalApp):
    """The Textual application that shows and steers one run."""

    CSS_PATH = "cockpit.tcss"
    TITLE = "cockpit"
    ACTIONS: ClassVar[tuple[Action, ...]] = APP
    BINDINGS: ClassVar[list[Binding]] = APP_KEYS  # type: ignore[assignment]
    ENABLE_COMMAND_PALETTE = True
    COMMANDS: ClassVar[set[type[Provider] | Callable[[], type[Provider]]]] = {CommandProvider}

    def __init__(
        self,
        source: Source,
        store: Store | None = None,
        keymap: dict[str, str] | None = None,
        theme: str = DEFAULT,
        refreshes_per_s: int = REFRESHES_PER_S,
        recorded: bool = False,
        folder: Path | None = None,
    ) -> None:
        super().__init__(theme)
        self.source = source
        self.store = store or Store(time.monotonic)
        self.session = Session(source, self.store, recorded, folder=folder, console=Console(folder))
        if folder:
            self.store.named_marks.open(folder)
        self.keymap = keymap or {}
        self._run_exit = RunExit(self, self.store, source)
        self.attaches_as_operator = False  # whether other runs are opened as operator
        self.opening: Starting | None = None  # the start screen; it closes itself at the first step
        self._frozen_store: Store | None = None
        self._typed: dict[str, list[str]] = {}  # texts entered at the prompt, by its sign
        self.navigator = self.make_navigator()
        self._visited = [FIRST_SCREEN]  # names of the visited screens; the last one is the current screen
        self._refreshes_per_s = refreshes_per_s
        self._attention: Attention | None = None
        self._tick = 0
        self._missed = 0  # ticks since the last update of the screens
        for name in RUN_SCREENS:
            self.add_mode(name, partial(self._run_screen, name))
        self.set_keymap(self.keymap)

    def on_mount(self) -> None:
        self.animation_level = "none"
        self.switch_mode(FIRST_SCREEN)
        if not self.is_headless and is_first_time():
            self.push_screen(Tour())
        if self.opening:
            self.push_screen(self.opening)
        self.source.start(self.store)
        self.source.sample(RUN_SCREENS[FIRST_SCREEN].SAMPLES)
        if not self.is_headless:
            self.exit_on_signals()
            self.show_colours_of(depth_of(self.console))
        self._attention = Attention(self.write_terminal)
        # The terminal was cleared, but Textual repaints only if the size has changed too.
        self.app_resume_signal.subscribe(self, lambda _: self.refresh(layout=True))
        self.set_interval(1 / self._refreshes_per_s, self._refresh_if_free)
        if not self.is_headless:
            self.call_after_refresh(short_pauses)
            self.call_after_refresh(self._load_screens, list(RUN_SCREENS))

    def _run_screen(self, name: str) -> RunScreen:
        return RUN_SCREENS[name](self.session)

    def _load_screens(self, names: list[str]) -> None:
        """Import the other screens after the first screen is drawn, one at a time, so that a key press waits for at
        most one import."""
        if not names:
            short_pauses()  # the imported modules also stay until the process ends
            return
        RUN_SCREENS[names[0]]
        self.set_timer(LOAD_EVERY_S, partial(self._load_screens, names[1:]))

    def on_unmount(self) -> None:
        if self._attention:
            self._attention.close()
        self.session.comparison.stop()
        self.source.stop()
        self.session.console.stop()

    # ------------------------------------------------------------------------------------- refresh

    def _refresh_if_free(self) -> None:
        """Update the screens. A refresh is skipped while the source writes to the store, or if a key has just arrived,
        so that the key's effect is painted first. At most `MOST_MISSED` refreshes in a row are skipped."""
        lock = self.store.lock
        self._missed += 1
        due = self._missed > MOST_MISSED
        if not due and time.monotonic() - self.key_at < KEY_FIRST_S:
            return
        if not lock.acquire(blocking=due):
            return
        try:
            self._missed = 0
            self.refresh_from_store()
        finally:
            lock.release()
        if not self.is_headless and time.monotonic() - self.key_at >= KEY_FIRST_S:
            collect_if_due()

    def refresh_from_store(self) -> None:
        """Update each visible screen from the store. A screen redraws only what has changed."""
        self._tick += 1
        store = self.shown
        with store.lock:
            for screen in self.screen_stack:
                if isinstance(screen, RunScreen):
                    screen.update_from(store, self._tick)
                elif isinstance(screen, Prompt):
                    screen.update_from(store)
                elif isinstance(screen, BoardScreen | Starting | Ending | RunsScreen | InfoScreen):
                    # dialogs that act on the run always show its current state
                    screen.update_from(self.store)
            self._run_exit.exit_if_ended()
            if self._attention:
                self._attention.update(self.store, self.bell)

    # ------------------------------------------------------------------------------------- actions

    async def action_screen(self, name: str) -> None:
        """Show one of the eight screens. The next key press is not processed until the screen can handle it (see
        `_opened`)."""
        if mounted := self.show_screen(name):
            await self._opened(mounted)

    def show_screen(self, name: str) -> AwaitMount | None:
        """Show one of the eight screens. Return None if it is already visible."""
        if name == self._visited[-1]:
            return None
        # Each screen is at most once in the list.
        self._visited = [*(seen for seen in self._visited if seen != name), name]
        return self._show_screen()

    async def show_panel(self, screen: str, name: str) -> None:
        """Show a screen and focus one of its panels."""
        await self.action_screen(screen)
        if isinstance(self.screen, RunScreen) and not self.screen.show_panel(name):
            title = PANEL_NAMES[screen][name]
            self.notify(f"no panel “{title}”: this terminal is too small, or there is nothing to show")

    async def _opened(self, mounted: AwaitMount) -> None:
        """Wait until a new screen has the focus and shows the store's data. Without this wait, keys that were typed
        ahead would have no effect."""
        await mounted
        self.refresh_from_store()

    async def action_previous_screen(self) -> None:
        """Return to the previous screen, or to the overview if there is none."""
        if len(self._visited) > 1:
            self._visited.pop()
        elif self._visited != [FIRST_SCREEN]:
            self._visited = [FIRST_SCREEN]
        await self._opened(self._show_screen())

    def _show_screen(self) -> AwaitMount:
        name = self._visited[-1]
        mounted = self.switch_mode(name)
        self.source.sample(RUN_SCREENS[name].SAMPLES)
        self.call_after_refresh(self.refresh_from_store)
        return mounted

    async def action_knobs(self) -> None:
        await self._opened(self.push_screen(BoardScreen(self.source, self.store)))

    def open_knob(self, name: str) -> None:
        """Open the knob board with the cursor on a knob."""
        board = BoardScreen(self.source, self.store)
        board.controller.select(name)
        self.push_screen(board)

    async def action_undo(self) -> None:
        """Open the knob board and show the change that an undo would revert."""
        board = BoardScreen(self.source, self.store)
        await self._opened(self.push_screen(board))
        board.call_after_refresh(board.action_undo)

    @property
    def next_run(self) -> NextRun | None:
        """The run to open after this app has exited."""
        return self._run_exit.next_run

    async def action_quit(self) -> None:
        """Exit; ask for confirmation first if the exit ends the run."""
        self._run_exit.quit()

    async def action_info(self) -> None:
        await self._opened(self.push_screen(InfoScreen(self.session)))

    async def action_runs(self) -> None:
        """List the runs, and switch to the run that the user chooses. If switching would end this run, the user must
        confirm first."""
        await self._opened(self.open_runs())

    def open_runs(self, at: Path | None = None) -> AwaitMount:
        """List the runs, with the cursor on the run in the folder `at`."""
        return self.push_screen(
            RunsScreen(self.session, self.attaches_as_operator, at), self._run_exit.to_next_run
        )

    def action_freeze(self) -> None:
        with self.store.lock:
            self._frozen_store = None if self._frozen_store else self.store.frozen()
        self.refresh_from_store()

    # ------------------------------------------------------------------------------------- navigation

    @property
    def shown(self) -> Store:
        """The store that the screens show: a frozen copy while the screens are frozen."""
        return self._frozen_store or self.store

    def make_navigator(self, seek: Callable[[int | None], None] | None = None) -> Navigator:
        return Navigator(self.session, lambda: self.shown, self.show_screen, tuple(RUN_SCREENS), seek)

    def action_go(self, step: int, rank: int | None, screen: str) -> None:
        """Open `screen` at `step` and, if `rank` is not None, with this rank selected."""
        if said := self.navigator.go(Jump(step, rank, screen=screen)):
            self.say(said)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disable the keys that open a prompt while a dialog is open, so that they can be typed as text. On all other
        screens, these keys take precedence over the keys of widgets."""
        return action not in PROMPT_ACTIONS or isinstance(self.screen, RunScreen)

    async def action_filter(self) -> None:
        await self._prompt(FilterLine(self.navigator))

    async def action_jump(self) -> None:
        await self._prompt(JumpLine(self.navigator, any_step=self.session.recorded))

    async def action_mark(self) -> None:
        await self._prompt(MarkLine(self.navigator))

    async def _prompt(self, line: PromptLine) -> None:
        """Open the prompt. The next key is not read until the prompt has the focus, because several keys may arrive at
        once."""
        prompt = Prompt(line, self._typed.setdefault(line.SIGN, []), lambda: self.shown)
        await self.push_screen(prompt, self._prompted)

    def _prompted(self, deed: Deed | None) -> None:
        if deed and (said := deed()):
            self.say(said)
        self.refresh_from_store()

    def action_anomaly(self, by: int) -> None:
        self.say(self.navigator.anomaly(by))
        self.refresh_from_store()

    def action_step_by(self, by: int) -> None:
        if said := self.navigator.step_by(by):
            self.say(said)
        self.refresh_from_store()

    def action_take_screenshot(self) -> None:
        step = self.shown.step
        name = f"cockpit-{self.store.run}-step{step if step is not None else 0}.svg".replace("/", "-")
        path = Path.cwd() / name
        try:
            path.write_text(self.export_screenshot(title=f"cockpit · {self.store.run}"), encoding="utf-8")
        except OSError as error:
            self.say(f"{path} cannot be written: {error.strerror}", severity="error")
        else:
            self.say(str(path), title="Screenshot")

    def choose_theme(self, name: str) -> None:
        super().choose_theme(name)
        self.refresh_from_store()

    async def action_help(self) -> None:
        focused = self.focused
        panel = focused if isinstance(focused, Panel) else None
        title, about, own = (panel.TITLE, panel.HELP, panel.ACTIONS) if panel else ("Cockpit", "", ())
        can_open_board = any(action.id == "app.knobs" for action in self.ACTIONS)
        sections = {
            title: own,
            "Panels": PANELS,
            "Screens": SCREENS,
            "Anywhere": self.ACTIONS,
            "Knob board": BOARD if can_open_board else (),
        }
        with self.shown.lock:
            names = vocabulary(self.shown)
        await self.push_screen(Help(title, about, sections, self.keymap, names))
