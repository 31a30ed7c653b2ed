"""Base class of the eight screens: status lines, panels in columns, tabs and a footer."""

from collections.abc import Sequence
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.geometry import Size
from textual.screen import Screen

from cockpit.data.store import Store
from cockpit.tui.keys.general_bindings import PANELS_KEYS, SCREENS
from cockpit.tui.session import Session
from cockpit.tui.widgets.footer import FittedFooter
from cockpit.tui.widgets.panel import Panel
from cockpit.tui.widgets.scrubber import Scrubber
from cockpit.tui.widgets.status import Status
from cockpit.tui.widgets.tabs import ScreenTabs

# Minimum width and height of each layout, largest first, and its class in the style sheet.
LAYOUTS = ((170, 48, "-wide"), (108, 32, "-medium"), (0, 0, "-narrow"))


class RunScreen(Screen[None]):
    """Shows its panels side by side on a large terminal, and one at a time on a small terminal.

    A subclass lists its panels by column in `columns`; the first panel gets the focus. `NAME` is the id of the screen
    in `SCREENS`.
    """

    BINDINGS: ClassVar[list[Binding]] = PANELS_KEYS  # type: ignore[assignment]
    NAME: ClassVar[str] = ""
    SAMPLES: ClassVar[frozenset[str]] = frozenset()  # samples that ranks send while this screen is visible
    SOLO: ClassVar[frozenset[str]] = frozenset({"-narrow"})  # layouts that show one panel at a time
    NOT_MEDIUM: ClassVar[frozenset[str]] = frozenset()  # panels that the medium layout hides

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self.shown = session.store  # the store that is on the screen: a copy while the screens are frozen
        self._layout_class = ""
        self._zoomed = False
        # The panels are attributes, because the timer also runs before they are mounted and after they are removed.
        self._status = Status(session.source.operator, session.selection)
        self._scrubber = Scrubber() if session.recorded else None
        self._tabs = ScreenTabs(SCREENS, self.NAME, session.selection)
        self._footer = FittedFooter()
        self._above, self._columns = self.above(), self.columns()
        panels = [*self._above, *(panel for column in self._columns for panel in column)]
        self._panels = {panel.id or "": panel for panel in panels}
        self._current = next(iter(self._panels))
        self.set_class(True, f"-{self.NAME}")

    def columns(self) -> Sequence[Sequence[Panel]]:
        """The panels of this screen, by column from the left."""
        raise NotImplementedError

    def above(self) -> Sequence[Panel]:
        """Full-width panels above the columns."""
        return ()

    def compose(self) -> ComposeResult:
        yield self._status
        if self._scrubber:
            yield self._scrubber
        with Vertical(id="body"):
            yield from self._above
            with Horizontal(id="panels"):
                for number, column in enumerate(self._columns):
                    yield Vertical(*column, id=f"column-{number}", classes="column")
        yield self._tabs
        yield self._footer

    def on_mount(self) -> None:
        self.set_focus(self._panels[self._current])  # immediately, because a key may have been typed ahead

    def on_screen_resume(self) -> None:
        """Draw the footer again, because it may show the keys of a dialog that was open on top of this screen."""
        self._footer.refresh()

    # ------------------------------------------------------------------------------------- refresh

    def update_from(self, store: Store, tick: int) -> None:
        """Update all panels from the store. The caller holds the store's lock."""
        self.shown = store
        self._status.update_from(store)
        if self._scrubber:
            self._scrubber.update_from(store)
        self._tabs.update_from(store)
        for panel in self._panels.values():
            if tick % panel.EVERY == 0 or not panel.shows(store):
                panel.update_from(store)

    # ------------------------------------------------------------------------------------- layout

    def _screen_resized(self, size: Size) -> None:
        """Lay out the screen again only if the size changed. When a dialog opens, Textual lays out all screens below it
        again, even though their size is the same."""
        if self is self.app.screen or size != self._compositor.size:
            super()._screen_resized(size)

    def on_resize(self, event: events.Resize) -> None:
        width, height = event.size
        self._layout_class = next(name for w, h, name in LAYOUTS if width >= w and height >= h)
        self._arrange()

    def _arrange(self) -> None:
        solo = self._zoomed or self._layout_class in self.SOLO
        layout = {name: name == self._layout_class for *_, name in LAYOUTS}
        before = self.classes
        self.update_classes({**layout, "-solo": solo}, update=False)
        # The styles of the screen include those of all its widgets, so matching them once is enough.
        whole = self.classes != before
        for name, panel in self._panels.items():
            panel.set_class(name == self._current, "-current", update=not whole)
        for column in self.query(".column, #panels"):
            column.set_class(bool(column.query(f"#{self._current}")), "-current", update=not whole)
        if whole:
            self.update_node_styles()

    def _reachable(self) -> list[str]:
        """Names of the panels that the screen can show at this terminal size, in reading order."""
        hidden = self.NOT_MEDIUM if self._layout_class == "-medium" else frozenset()
        return [name for name in self._panels if name not in hidden]

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        if isinstance(event.widget, Panel) and event.widget.id != self._current:
            self._current = event.widget.id or self._current
            self._arrange()

    # ------------------------------------------------------------------------------------- actions

    def action_turn(self, by: int) -> None:
        names = self._reachable()
        at = names.index(self._current) if self._current in names else -1
        self._current = names[(at + by) % len(names)]
        self._arrange()
        self._panels[self._current].focus()

    def show_panel(self, name: str) -> bool:
        """Give a panel the focus. Returns False if the panel is not shown at this terminal size or for this run."""
        if name not in self._reachable():
            return False
        self._current = name
        self._arrange()
        self._panels[name].focus()
        return True

    def action_zoom(self) -> None:
        self._zoomed = not self._zoomed
        self._arrange()

    async def action_open(self) -> None:
        """Open the screen that shows the details of the focused panel."""
        screen = self._panels[self._current].OPENS
        if screen and screen != self.NAME:
            await self.run_action(f"app.screen('{screen}')")

    async def action_back(self) -> None:
        """Leave the maximised panel, or return to the previous screen."""
        if self._zoomed:
            self._zoomed = False
            self._arrange()
        else:
            await self.run_action("app.previous_screen")
