"""The tour, shown to a new user at the first start for ten seconds or until a key is pressed."""

from pathlib import Path

import platformdirs
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import Static

from cockpit.tui.dialogs.dialog import Dialog
from cockpit.tui.drawing.theme import palette

SECONDS = 10.0
SEEN = "tour-seen"  # file in the user's state folder that marks the tour as seen
LINES = (
    ("lines 1-2", "the state of the run, its diagnosis, and the recommended next step"),
    ("1 - 8", "screens: overview, ranks, pipeline, experts, traffic, curves, plan, log"),
    ("arrows, ⏎, esc", "select an item, see its details, go back"),
    ("n", "go to the next anomaly"),
    ("k", "knobs: change the run while it trains, with a preview and an undo"),
    ("?", "help for the focused panel, with all keys"),
)


class Tour(Dialog[None]):
    """A dialog that shows new users the parts of the screen and the most important keys."""

    _closed = False

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog") as dialog:
            dialog.border_title = "Welcome to the cockpit"
            dialog.border_subtitle = "any key"
            colours = palette(self.app.theme)
            for what, meaning in LINES:
                with Horizontal():
                    yield Static(Text(what, colours.strong), classes="what")
                    yield Static(Text(meaning, colours.text))

    def on_screen_resume(self) -> None:
        self.set_timer(SECONDS, self._close)

    def on_key(self, event: events.Key) -> None:
        event.stop()
        self._close()

    def on_click(self) -> None:
        self._close()

    def _close(self) -> None:
        # A dialog stays current until it is removed, so a key and the timer could both close it. Textual raises an
        # error if a screen is dismissed twice.
        if self.is_current and not self._closed:
            self._closed = True
            self.dismiss()


def is_first_time(folder: Path | None = None) -> bool:
    """Returns True on the first call for this user, and writes a file so that later calls return False. Returns False
    if the file cannot be written."""
    try:
        folder = folder or platformdirs.user_state_path("cockpit")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SEEN).touch(exist_ok=False)
    except (OSError, RuntimeError):  # seen before, no home directory, or not writable
        return False
    return True
