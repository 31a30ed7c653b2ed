"""Base class for applications in a terminal: handles colours, signals, job control, typed-ahead keys, and plain-text
notifications."""

import asyncio
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from textual import events
from textual.app import App
from textual.filter import ANSIToTruecolor, LineFilter
from textual.notifications import SeverityLevel
from textual.screen import Screen

from cockpit.data.format import clean
from cockpit.tui.drawing.stylesheet import KeptStylesheet
from cockpit.tui.drawing.themes import ALL_THEMES, HUES, Depth, fitting, offered
from cockpit.tui.terminal.colours import forget_empty_no_color, no_colour
from cockpit.tui.terminal.terminal import TerminalDriver


class TerminalApp(App[None]):
    """A Textual app with the terminal features that the cockpit needs. This class contains nothing that is specific to
    training runs. `theme`: the name of the theme to start with.
    """

    def __init__(self, theme: str) -> None:
        # textual-serve sets the driver that sends the screen to a browser.
        driver = None if "TEXTUAL_DRIVER" in os.environ else TerminalDriver
        forget_empty_no_color()
        # Textual shows shades of grey under NO_COLOR, unless it leaves colours to the terminal.
        self.depth = Depth.NONE if no_colour() else Depth.FULL
        super().__init__(driver_class=driver, ansi_color=True if self.depth is Depth.NONE else None)
        self.remember_theme: Callable[[str], str] | None = None  # see `settings.save_theme`
        self.key_at = -math.inf  # time of the newest key, as of `time.monotonic`
        self._sent_to: WeakKeyDictionary[events.Key, Screen[Any]] = WeakKeyDictionary()
        for one in ALL_THEMES.values():
            self.register_theme(one)
        self.theme = fitting(theme, self.depth)
        self.stylesheet = KeptStylesheet(variables=self.get_css_variables())

    def exit_on_signals(self) -> None:
        """Exit cleanly on SIGTERM, SIGHUP and SIGINT: restore the terminal and stop the processes that the cockpit
        started.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            loop.add_signal_handler(number, self.exit)

    def action_suspend_process(self) -> None:
        """Suspend the process group. If only this process were suspended, a parent such as `make` would block the
        shell."""
        if self._driver is None or not self._driver.can_suspend:
            self.say("cannot suspend the cockpit: this terminal has no job control")
            return
        self.app_suspend_signal.publish(self)
        os.killpg(0, signal.SIGTSTP)

    async def on_event(self, event: events.Event) -> None:
        """Make sure that a key reaches the screen that an earlier key has opened. If several keys arrive together,
        Textual forwards all of them to the screen that is visible at that time. The app's own bindings run later, when
        the keys bubble up from that screen. If another screen is visible by then, the key is sent to the new screen.
        """
        if isinstance(event, events.Key):
            self.key_at = time.monotonic()
            if self._sent_to.get(event, self.screen) is not self.screen:
                event = events.Key(event.key, event.character)
            self._sent_to[event] = self.screen
        await super().on_event(event)

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Textual's line filters without the filter that converts ANSI colours and dim text to RGB colours. The themes
        of the cockpit use neither, and the filter would take a tenth of the drawing time."""
        return [one for one in super().get_line_filters() if not isinstance(one, ANSIToTruecolor)]

    def write_terminal(self, sequence: str) -> None:
        """Send a control sequence to the terminal. In a browser or a test there is no terminal, so nothing is sent."""
        if isinstance(self._driver, TerminalDriver):
            self._driver.write(sequence)
            self._driver.flush()

    def say(
        self,
        text: str,
        title: str = "",
        severity: SeverityLevel = "information",
        timeout: float | None = None,
    ) -> None:
        """Show a notification as plain text, not markup, because names of runs and files may contain brackets. The
        notification replaces the previous one, so that a repeated key does not fill the screen."""
        self.clear_notifications()
        self.notify(clean(text), title=title, severity=severity, timeout=timeout, markup=False)

    def show_colours_of(self, depth: Depth) -> None:
        """Switch to a theme that fits the terminal's number of colours. Does nothing if the user turned colours off."""
        if self.depth is not Depth.NONE:
            self.depth = depth
            self.theme = fitting(self.theme, depth)

    def action_theme(self) -> None:
        names = offered(self.depth)
        self.choose_theme(names[(names.index(self.theme) + 1) % len(names)])

    def choose_theme(self, name: str) -> None:
        """Switch to the theme `name` and save the choice for the next start. On a terminal with few colours, switch to
        a substitute theme instead, and do not save the choice."""
        self.theme = fitting(name, self.depth)
        note = ""
        if self.depth is not Depth.FULL:
            note = f" · this terminal shows {self.depth.value}"
        elif self.remember_theme:
            note = f" · {self.remember_theme(name)}"
        self.say(f"{self.theme}: {HUES[self.theme].about}{note}", title="Theme")
