"""The line with the eight screens and their keys; the current screen is highlighted."""

from collections.abc import Sequence

from textual import events
from textual.strip import Strip
from textual.widget import Widget

from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.store import Store
from cockpit.tui.drawing.strips import StripLine, blank
from cockpit.tui.drawing.theme import Palette, palette
from cockpit.tui.keys.action import Action
from cockpit.tui.session import Selection


class ScreenTabs(Widget):
    """One line such as `` 1 Overview  2 Ranks  3 Pipeline ...``; a click on a name opens the screen. `current`: the id
    of the current screen.

    An applied filter is shown on the right. If the filter does not fit beside the names of the screens, all screens
    except the current one are shown as numbers only.
    """

    def __init__(self, screens: Sequence[Action], current: str, selection: Selection) -> None:
        super().__init__(id="tabs")
        self._selection = selection
        self._screens = screens
        self._current = f"screen.{current}"
        self._strip = Strip([])
        self._ends: list[tuple[int, Action]] = []  # the column after each tab, and its screen

    def update_from(self, store: Store) -> None:
        """Redraw if the line changed."""
        width = self.size.width
        if not self.is_attached or width < 2:
            return
        colours = palette(self.app.theme)
        chosen = self._selection.filter
        note = f" / {chosen.text} " if chosen else ""
        line = self._tabs(colours, whole=True)
        if note and line.width + len(note) > width:
            line = self._tabs(colours, whole=False)
        line.add(note.rjust(width - line.width), colours.level[Level.WARN])
        strip = line.strip(width, colours.text)
        if strip != self._strip:
            self._strip = strip
            self.refresh()

    def _tabs(self, colours: Palette, whole: bool) -> StripLine:
        """The line of tabs. If `whole` is false, only the current tab shows its name."""
        line = StripLine()
        self._ends = []
        for screen in self._screens:
            here = screen.id == self._current
            line.add(f" {screen.keys} ", colours.cursor if here else colours.accent)
            if here or whole:
                line.add(f"{screen.label} ", colours.cursor if here else colours.dim)
            self._ends.append((line.width, screen))
        return line

    def render_line(self, y: int) -> Strip:
        if y == 0 and self._strip.cell_length == self.size.width:
            return self._strip
        return blank(self.size.width, palette(self.app.theme).text)

    async def on_click(self, event: events.Click) -> None:
        hit = next((screen for end, screen in self._ends if event.x < end), None)
        if hit:
            await self.run_action(f"app.{hit.action}")
