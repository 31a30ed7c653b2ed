"""The footer: one line with the keys of the current screen, or the most important keys if not all fit.

Textual's own footer has a widget for each key. Whenever the focus moves, that footer creates all these widgets again,
which delays the action of the key that moved the focus.
"""

from collections.abc import Collection
from dataclasses import dataclass

from rich.cells import cell_len
from rich.style import Style
from textual import events
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget

from cockpit.tui.drawing.strips import StripLine, blank
from cockpit.tui.drawing.theme import palette
from cockpit.tui.keys.all_bindings import BY_ID

BOLD = Style(bold=True)


@dataclass(frozen=True)
class _Key:
    """One action in the footer: the key to press, and how the footer shows the key (`shown`) and the action
    (`label`)."""

    key: str
    shown: str
    label: str
    importance: int  # actions with the lowest number first; Textual's own actions last

    @property
    def width(self) -> int:
        """Width in cells of the drawn text, such as `` k knobs ``."""
        return cell_len(self.shown) + cell_len(self.label) + 3


class FittedFooter(Widget):
    """Shows as many keys as fit; a click on a key has the effect of pressing it. `without`: ids of actions that the
    footer omits."""

    def __init__(self, without: Collection[str] = ()) -> None:
        super().__init__()
        self._without = without
        self._ends: list[tuple[int, str]] = []  # the column after each action, and its key

    def on_mount(self) -> None:
        self.screen.bindings_updated_signal.subscribe(self, self._changed)

    def _changed(self, screen: Screen[object]) -> None:
        self.refresh()

    def _keys(self) -> list[_Key]:
        """The actions of the active bindings, in order and without duplicates. If not all fit in the footer, the least
        important are left out."""
        found: dict[str, _Key] = {}
        for active in self.screen.active_bindings.values():
            binding, id = active.binding, active.binding.id or ""
            if binding.show and binding.action not in found and id not in self._without:
                importance = BY_ID[id].footer if id in BY_ID else 99
                shown = self.app.get_key_display(binding)
                found[binding.action] = _Key(binding.key, shown, binding.description, importance)
        keys = list(found.values())
        while len(keys) > 1 and sum(key.width for key in keys) > self.size.width:
            keys.remove(max(keys, key=lambda key: key.importance))
        return keys

    def render_line(self, y: int) -> Strip:
        colours, width = palette(self.app.theme), self.size.width
        if y or width < 2:
            return blank(width, colours.text)
        line = StripLine()
        self._ends = []
        for key in self._keys():
            line.add(f" {key.shown} ", colours.accent + BOLD).add(f"{key.label} ", colours.dim)
            self._ends.append((line.width, key.key))
        return line.strip(width, colours.text)

    def on_click(self, event: events.Click) -> None:
        hit = next((key for end, key in self._ends if event.x < end), None)
        if hit:
            self.app.simulate_key(hit)
