"""Base class of panels: a bordered area that shows part of the store and redraws only changed lines.

The app's timer calls `update_from`. The panel then draws all its lines as strips and passes only the changed strips to
the compositor. The result of `draw` depends only on the store, the size, the palette and the user's choices, not on a
clock or a socket.
"""

from typing import ClassVar

from textual import events
from textual.content import Content
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

from cockpit.data.format import clean
from cockpit.data.store import Store, Topic
from cockpit.tui.drawing.strips import StripLine, blank
from cockpit.tui.drawing.theme import Palette, palette
from cockpit.tui.keys.action import Action


class Panel(Widget, can_focus=True):
    """Base class of all panels."""

    TOPICS: ClassVar[frozenset[Topic]] = frozenset()
    TITLE: ClassVar[str] = ""
    HELP: ClassVar[str] = ""
    NATURAL: ClassVar[bool] = False  # whether the height follows the content instead of a share of the screen
    EVERY: ClassVar[int] = 1  # the panel updates at every n-th tick of the timer
    ACTIONS: ClassVar[tuple[Action, ...]] = ()
    NEEDS_RUN: ClassVar[bool] = True  # whether the panel has nothing to show before a rank has joined
    OPENS: ClassVar[str] = ""  # name of the screen with the details of this panel

    def __init__(self, id: str) -> None:
        super().__init__(id=id, classes="panel")
        self._titles = (self.TITLE, "")
        self.border_title = self.TITLE
        self._store = Store()
        self._seen: tuple[object, ...] = ()
        self._strips: list[Strip] = []
        self._wanted_height = 1
        self._laid_out_height = 1  # `_wanted_height` at the last layout

    # ------------------------------------------------------------------------------ for subclasses

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        """The lines to draw, from the top of the panel; at most `height` lines. The rest of the panel stays empty."""
        raise NotImplementedError

    def title(self, store: Store) -> str:
        return self.TITLE

    def subtitle(self, store: Store) -> str:
        return ""

    def natural_height(self, store: Store) -> int:
        """The number of lines that the content needs. Used only for panels with `NATURAL` set."""
        return 1

    def choice(self) -> object:
        """The user's choices on which the drawing depends, as one comparable value. A new value causes a redraw."""
        return None

    # --------------------------------------------------------------------------------- redrawing

    @property
    def colours(self) -> Palette:
        return palette(self.app.theme)

    def update_from(self, store: Store) -> None:
        """Redraw if the data, the size or the user's choices changed. The caller holds the store's lock."""
        self._store = store
        if not self.is_on_screen:
            return
        if self._wanted_height != self._laid_out_height and self._has_auto_height:
            self.refresh(layout=True)  # Textual drops a layout request while another is pending
        size = self.content_size
        seen = (
            id(store),
            size,
            self.app.theme,
            self.choice(),
            self.has_focus,
            *(store.revisions[topic] for topic in self.TOPICS),
        )
        if seen == self._seen:
            return
        self._seen = seen
        # Compare first, because Textual redraws the whole panel when a title is set, even to the same text.
        titles = self.title(store), self.subtitle(store)
        if titles != self._titles:
            self._titles = titles
            # `Content`, because Textual reads a plain string as markup, and names from a run may contain brackets.
            self.border_title, self.border_subtitle = (Content(clean(text)) for text in titles)
        if (
            self.NATURAL
            and store.state.hellos
            and (wanted := self.natural_height(store)) != self._wanted_height
        ):
            self._wanted_height = wanted
            self.refresh(layout=True)
        self._show(self._strips_of(store, size))

    def _strips_of(self, store: Store, size: Size) -> list[Strip]:
        colours = self.colours
        if size.width < 1 or size.height < 1:
            return []
        if self.NEEDS_RUN and not store.state.hellos:
            lines = [StripLine().add("· no data yet", colours.faint)]
        else:
            lines = self.draw(store, size.width, size.height, colours)
        return [line.strip(size.width, colours.text) for line in lines[: size.height]]

    def _show(self, strips: list[Strip]) -> None:
        old, self._strips = self._strips, strips
        if len(old) != len(strips):
            self.refresh()
            return
        width = self.content_size.width
        changed = [y for y, (was, now) in enumerate(zip(old, strips, strict=True)) if was != now]
        if changed:
            # Refresh whole lines, because Textual redraws the part of a line before a partial region too.
            self.refresh(*[Region(0, y, width, 1) for y in changed])

    @property
    def is_on_screen(self) -> bool:
        return self.is_attached and self.display and self.region.area > 0

    @property
    def _has_auto_height(self) -> bool:
        height = self.styles.height
        return height is not None and height.is_auto

    @property
    def drawn(self) -> bool:
        return bool(self._strips)

    def shows(self, store: Store) -> bool:
        """Whether the panel has been drawn, and its last update came from `store`. Before the first update, a panel has
        an empty store of its own.
        """
        return self._store is store and self.drawn

    def redraw(self) -> None:
        """Redraw the panel at once, for example after a key press, instead of at the next update."""
        with self._store.lock:
            self.update_from(self._store)

    def render_line(self, y: int) -> Strip:
        if y < len(self._strips) and self._strips[y].cell_length == self.content_size.width:
            return self._strips[y]
        return blank(self.content_size.width, self.colours.text)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        self._laid_out_height = self._wanted_height
        return self._wanted_height

    # ---------------------------------------------------------------------------------------- mouse

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._press("up", event)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self._press("down", event)

    def on_click(self, event: events.Click) -> None:
        """A double click has the effect of Enter."""
        if event.chain == 2:
            self.call_later(self.run_action, "screen.open")

    def _press(self, key: str, event: events.MouseEvent) -> None:
        """Treat a turn of the mouse wheel as an arrow key, so that the wheel works in every list and for every cursor.
        A panel that handles the wheel itself calls `event.prevent_default()`."""
        action = next((one.action for one in self.ACTIONS if key in one.keys.split(",")), None)
        if action:
            event.stop()
            self.call_later(self.run_action, action)

    def on_resize(self, event: events.Resize) -> None:
        self.redraw()

    def on_show(self) -> None:
        self.redraw()
