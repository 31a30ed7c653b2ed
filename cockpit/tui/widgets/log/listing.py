"""Base class of panels with a long list. Provides a cursor, scrolling (the list can follow the newest item), a text
search, and lines that are wrapped or truncated."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Generic, TypeVar

from rich.cells import cell_len
from rich.style import Style
from textual import events
from textual.binding import Binding

from cockpit.data import format
from cockpit.data.scroll import Scroll
from cockpit.data.store import Store
from cockpit.tui.drawing.strips import StripLine, paragraph
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.widgets.panel import Panel

T = TypeVar("T")
PAN = 16  # number of columns by which one key press scrolls to the left or right
MOST_TYPED = 64  # maximum length of the search text, in characters


class ListPanel(Panel, Generic[T]):
    """A panel with a list of items, oldest first. A subclass supplies the items, and the key and text of each item."""

    BINDINGS: ClassVar[list[Binding]] = []  # type: ignore[assignment]
    EMPTY: ClassVar[str] = "nothing yet"
    DETAILS: ClassVar[bool] = False  # whether the lower third shows details of the item at the cursor

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self.scroll = Scroll()
        self.wrapped = False
        self.typing = False  # whether keys are typed into the search text
        self.text = ""  # list only items that contain this text
        self._pan = 0
        self._page = 1  # number of lines of the list
        self._below = 0
        self._cursor = 0  # index of the item at the cursor
        self._listed: Sequence[T] = ()

    # ------------------------------------------------------------------------------ for subclasses

    def items(self, store: Store) -> Sequence[T]:
        """The items that match the search."""
        raise NotImplementedError

    def key_of(self, item: T) -> object:
        """The key that identifies an item."""
        raise NotImplementedError

    def place_of(self, key: object, items: Sequence[T]) -> int | None:
        """The index of the item with this key."""
        return next((at for at in range(len(items) - 1, -1, -1) if self.key_of(items[at]) == key), None)

    def columns(self, item: T, items: Sequence[T], width: int, colours: Palette) -> StripLine:
        """The fixed-width columns to the left of an item's text."""
        return StripLine()

    def parts(self, item: T, colours: Palette) -> list[tuple[str, Style]]:
        """The text of an item, as (text, style) parts. The panel wraps the text, or cuts it at the edge."""
        raise NotImplementedError

    def details(self, item: T, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        """Lines about the item at the cursor, shown below the list."""
        return []

    def empty_text(self, store: Store) -> str:
        """A line that says why there are no items."""
        return f"no line has “{self.text}” · esc lists all" if self.text else self.EMPTY

    def changed(self) -> None:
        """Hook that is called when the search text has changed."""

    # --------------------------------------------------------------------------------------- state

    def choice(self) -> object:
        # `_below` is known only after a redraw and is part of the subtitle, so a new value needs another redraw.
        return (
            self.scroll.key,
            self.scroll.row,
            self.wrapped,
            self.typing,
            self.text,
            self._pan,
            self._below,
        )

    def position(self) -> str:
        """A phrase such as ``12 newer`` if the newest items are below the visible lines, otherwise ""."""
        return f"↓ {format.grouped(self._below)} newer" if self._below else ""

    # ------------------------------------------------------------------------------------- drawing

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        self._listed = items = self.items(store)
        foot = [self._find_line(len(items), colours)] if self.typing or self.text else []
        room = max(1, height - len(foot))
        if not items:
            self._below = 0
            why = paragraph(f"{format.MISSING} {self.empty_text(store)}", width, colours.faint, hanging=2)[
                :room
            ]
            return [*why, *[StripLine()] * (room - len(why)), *foot]
        below = self._details_height(room, len(items)) if self.DETAILS and room >= 12 else 0
        self._page = room - below
        drawn: dict[int, list[StripLine]] = {}

        def lines_of(at: int) -> list[StripLine]:
            if at not in drawn:
                drawn[at] = self._lines(items[at], items, width - 1, colours)
            return drawn[at]

        window = self.scroll.visible(
            len(items),
            lambda key: self.place_of(key, items),
            (lambda at: len(lines_of(at))) if self.wrapped else (lambda at: 1),
            self._page,
        )
        self._below, self._cursor = window.below, window.cursor
        if self.has_focus:  # faint text cannot be read on the background of the cursor
            clear = replace(colours, faint=colours.dim)
            drawn[window.cursor] = self._lines(items[window.cursor], items, width - 1, clear)
        lines = []
        for at, number in window.lines:
            marked = at == window.cursor
            line = StripLine().add("▸" if marked and not number else " ", colours.accent)
            line.extend(lines_of(at)[number])
            if marked and self.has_focus:
                line = line.on(colours.cursor).pad_to(width, colours.cursor)
            lines.append(line)
        lines += [StripLine()] * (self._page - len(lines))
        if below:
            about = self.details(items[window.cursor], store, width, below, colours)[:below]
            lines += about + [StripLine()] * (below - len(about))
        return lines + foot

    def _details_height(self, room: int, count: int) -> int:
        """The height of the details below the list: a third of the panel or, while the list is short, up to two
        thirds."""
        free = 0 if self.wrapped else room - count - 1
        return min(2 * room // 3, max(room // 3, free))

    def _lines(self, item: T, items: Sequence[T], width: int, colours: Palette) -> list[StripLine]:
        """The lines of an item: a single line or, with line wrapping, as many lines as its text needs."""
        head = self.columns(item, items, width, colours)
        room = max(8, width - head.width)
        if not self.wrapped:
            return [head.extend(cut(self.parts(item, colours), self._pan))]
        first, *more = wrap(self.parts(item, colours), room)
        indent = width - room
        return [
            head.extend(first),
            *(StripLine().pad_to(indent, colours.text).extend(line) for line in more),
        ]

    def _find_line(self, found: int, colours: Palette) -> StripLine:
        line = StripLine().add("find ", colours.accent).add(self.text, colours.strong)
        line.add("▏" if self.typing else "", colours.accent)
        number = f"  {format.grouped(found)} {'line' if found == 1 else 'lines'}"
        keys = "enter keeps it · esc lists all" if self.typing else "esc lists all"
        return line.add(number, colours.dim).add(f" · {keys}", colours.faint)

    # ------------------------------------------------------------------------------------- actions

    def on_key(self, event: events.Key) -> None:
        """While the user types a search text, keys only edit this text or end the search."""
        if self.typing:
            if event.key in ("enter", "tab", "down", "up"):
                self.typing = False
            elif event.key == "escape":
                self._set_text("", typing=False)
            elif event.key == "backspace":
                self._set_text(self.text[:-1], typing=True)
            elif event.character and event.character.isprintable() and len(self.text) < MOST_TYPED:
                self._set_text(self.text + event.character, typing=True)
        elif event.key == "escape" and self.text:
            self._set_text("", typing=False)
        else:
            return
        event.stop()
        event.prevent_default()
        self.redraw()

    def on_paste(self, event: events.Paste) -> None:
        if self.typing:
            self._set_text((self.text + format.clean(event.text))[:MOST_TYPED], typing=True)
            event.stop()
            self.redraw()

    def _set_text(self, text: str, typing: bool) -> None:
        self.text, self.typing = text, typing
        self.changed()

    def action_find(self) -> None:
        self.typing = True
        self.redraw()

    def action_wrap(self) -> None:
        self.wrapped, self._pan = not self.wrapped, 0
        self.redraw()

    def action_pan(self, by: int) -> None:
        self._pan = 0 if self.wrapped else max(0, self._pan + by * PAN)
        self.redraw()

    def action_move(self, by: int) -> None:
        items = self._listed
        self.scroll.move(by, len(items), lambda at: self.key_of(items[at]))
        self.redraw()

    def action_page(self, by: int) -> None:
        self.action_move(by * max(1, self._page - 1))

    def action_newest(self) -> None:
        self.scroll.newest()
        self.redraw()

    def action_oldest(self) -> None:
        self.action_move(-len(self._listed))

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.prevent_default()
        event.stop()
        self.action_move(3)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.prevent_default()
        event.stop()
        self.action_move(-3)

    @property
    def chosen(self) -> T | None:
        """The item at the cursor."""
        return self._listed[min(self._cursor, len(self._listed) - 1)] if self._listed else None


def cut(parts: Sequence[tuple[str, Style]], skip: int) -> StripLine:
    """`parts` as one line, without the first `skip` characters."""
    line = StripLine()
    for text, style in parts:
        line.add(text[skip:], style)
        skip = max(0, skip - len(text))
    return line


def wrap(parts: Sequence[tuple[str, Style]], width: int) -> list[StripLine]:
    """The text in lines of at most `width` cells, broken after spaces where possible."""
    lines = [StripLine()]
    for text, style in parts:
        rest = format.clean(text)
        while rest:
            room = width - lines[-1].width
            if room < 1:
                lines.append(StripLine())
                continue
            piece = _piece(rest, room, width if lines[-1].width else room)
            if not piece:
                lines.append(StripLine())
                rest = rest.lstrip(" ")
                continue
            lines[-1].add(piece, style)
            rest = rest[len(piece) :]
    return lines


def _piece(text: str, room: int, width: int) -> str:
    """The start of `text` that fits into `room` cells, cut after a space if possible; "" if the first word does not fit
    here but fits on a new line of `width` cells."""
    fitting = _fitting(text, room)
    if fitting == len(text):
        return text
    space = text.rfind(" ", 0, fitting + 1)
    if space > 0:
        return text[: space + 1][:fitting]
    word = text.split(" ", 1)[0]
    if width > room and _fitting(word, width) == len(word):
        return ""
    return text[: max(1, fitting)]


def _fitting(text: str, room: int) -> int:
    """How many characters from the start of the text fit into `room` cells."""
    used = 0
    for number, letter in enumerate(text):
        used += cell_len(letter)
        if used > room:
            return number
    return len(text)
