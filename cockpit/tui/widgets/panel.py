"""A panel: a bordered area that draws lines of the store, only when what it shows has changed.

A panel is asked to `look` by the app's one timer. It draws all its lines then, as plain strips, and hands the
compositor only the lines that differ. `draw` is a function of the store, the size and the palette, and of
what the person at the keyboard chose; it reads no clock and touches no socket.
"""

from typing import ClassVar

from textual import events
from textual.content import Content
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

from cockpit.data.format import clean
from cockpit.data.store import Store, Topic
from cockpit.tui.keys import Action
from cockpit.tui.strips import StripLine, blank
from cockpit.tui.theme import Palette, palette


class Panel(Widget, can_focus=True):
    """Base of all panels of a screen."""

    TOPICS: ClassVar[frozenset[Topic]] = frozenset()
    TITLE: ClassVar[str] = ""
    HELP: ClassVar[str] = ""
    NATURAL: ClassVar[bool] = False  # as high as its content wants, instead of a share of the space
    EVERY: ClassVar[int] = 1  # looks at every n-th tick only
    ACTIONS: ClassVar[tuple[Action, ...]] = ()

    def __init__(self, id: str) -> None:
        super().__init__(id=id, classes="panel")
        self._titles = (self.TITLE, "")
        self.border_title = self.TITLE
        self._store = Store()
        self._seen: tuple[object, ...] = ()
        self._strips: list[Strip] = []
        self._wanted = 1
        self._laid_out = 1  # of `_wanted`, what the last layout has heard

    # ------------------------------------------------------------------------------ what a panel says

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        """The lines, from the top; fewer than `height` leave the rest empty."""
        raise NotImplementedError

    def title(self, store: Store) -> str:
        return self.TITLE

    def subtitle(self, store: Store) -> str:
        return ""

    def natural_height(self, store: Store) -> int:
        """Lines the content wants (only asked of a NATURAL panel)."""
        return 1

    def choice(self) -> object:
        """What the person chose of this panel's ways to show; part of what makes it stale."""
        return None

    # --------------------------------------------------------------------------------- machinery

    @property
    def colours(self) -> Palette:
        return palette(self.app.theme)

    def update_from(self, store: Store) -> None:
        """Show what the store holds now. Called with the store's lock held."""
        self._store = store
        if not self.is_on_screen:
            return
        if self._wanted != self._laid_out and self._is_as_high_as_it_wants:
            self.refresh(layout=True)  # Textual does not count a wish while another is on its way
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
        # Compared first: setting either redraws the whole panel, even if it is the same.
        titles = self.title(store), self.subtitle(store)
        if titles != self._titles:
            self._titles = titles
            # As content: a run's own names stand in them, and Textual would read a string as markup.
            self.border_title, self.border_subtitle = (Content(clean(text)) for text in titles)
        if self.NATURAL and store.state.hellos and (wanted := self.natural_height(store)) != self._wanted:
            self._wanted = wanted
            self.refresh(layout=True)
        self._show(self._strips_of(store, size))

    def _strips_of(self, store: Store, size: Size) -> list[Strip]:
        colours = self.colours
        if size.width < 1 or size.height < 1:
            return []
        if not store.state.hellos:
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
            # Whole lines: a region that starts inside one makes the terminal redraw all that is left of it.
            self.refresh(*[Region(0, y, width, 1) for y in changed])

    @property
    def is_on_screen(self) -> bool:
        return self.is_attached and self.display and self.region.area > 0

    @property
    def _is_as_high_as_it_wants(self) -> bool:
        height = self.styles.height
        return height is not None and height.is_auto

    @property
    def drawn(self) -> bool:
        return bool(self._strips)

    def redraw(self) -> None:
        """Something of the person's choice changed: draw at once."""
        with self._store.lock:
            self.update_from(self._store)

    def render_line(self, y: int) -> Strip:
        if y < len(self._strips) and self._strips[y].cell_length == self.content_size.width:
            return self._strips[y]
        return blank(self.content_size.width, self.colours.text)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        self._laid_out = self._wanted
        return self._wanted

    def on_resize(self, event: events.Resize) -> None:
        self.redraw()

    def on_show(self) -> None:
        self.redraw()
