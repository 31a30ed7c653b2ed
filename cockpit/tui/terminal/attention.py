"""Attracts the attention of a user who is not looking at the app: shows the state of the run in the terminal title, and
rings the bell and sends a desktop notification when there are new severe alerts, except in a replay.

The title is saved at the start and restored at the end with xterm's title stack, which tmux and most terminals support.
"""

import os
from collections.abc import Callable, Mapping

from agents.protocol import Alert
from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import diagnosis
from cockpit.data.diagnosis.status import SIMULATED, status_word
from cockpit.data.store import Store

SAVE_TITLE, RESTORE_TITLE = "\x1b[22;0t", "\x1b[23;0t"
# terminals that show OSC 9 as a notification
NOTIFYING = {
    "iTerm.app",
    "WezTerm",
    "ghostty",
    "kitty",
    "foot",
}
MOST_CHARS = 200

Write = Callable[[str], None]


def notifies(environment: Mapping[str, str]) -> bool:
    """Whether the terminal is known to show OSC 9 notifications. tmux and screen do not forward them to the
    terminal."""
    if "TMUX" in environment or environment.get("TERM", "").startswith(("screen", "tmux")):
        return False
    known = environment.get("TERM_PROGRAM") in NOTIFYING or "KITTY_WINDOW_ID" in environment
    return known or environment.get("TERM", "") in ("foot", "xterm-ghostty", "xterm-kitty")


class Attention:
    """Sets the terminal title and sends desktop notifications for one run. `write` sends a control sequence to the
    terminal."""

    def __init__(self, write: Write, environment: Mapping[str, str] = os.environ) -> None:
        self._write = write
        self._notifies = notifies(environment)
        self._title = ""
        self._known: set[tuple[str, str]] = set()  # severe alerts that were active at the last update
        write(SAVE_TITLE)

    def update(self, store: Store, bell: Callable[[], None]) -> None:
        """Update the title. Ring the bell and send a notification for each new severe alert. The caller holds the
        store's lock."""
        title = title_of(store)
        if title != self._title:
            self._title = title
            self._write(f"\x1b]2;{title}\x07")
        severe = {key: alert for key, alert in store.state.alerts.items() if alert.level == "error"}
        new = [alert for key, alert in severe.items() if key not in self._known]
        self._known = set(severe)
        if new and not store.playback_position:
            bell()
            if self._notifies:
                self._write(f"\x1b]9;{notification(store, new[0])}\x07")

    def close(self) -> None:
        """Restore the title that the terminal had before."""
        self._write(RESTORE_TITLE)


def title_of(store: Store) -> str:
    """The terminal title, such as ``✗ STALLED · demo · cockpit``, without control characters."""
    word, level = status_word(store)
    found = diagnosis(store)
    level = found.level if found.headline else level
    words = [f"{level.value} {found.headline or word.split(' ')[0]}"]
    words += [SIMULATED] if store.simulated else []
    words += [store.run, "cockpit"] if store.state.hellos else ["cockpit"]
    return format.clean(" · ".join(words))[:MOST_CHARS]


def notification(store: Store, alert: Alert) -> str:
    """The text of a desktop notification: the run and the alert, without control characters."""
    return format.clean(f"{store.run}: {alert.text}")[:MOST_CHARS]
