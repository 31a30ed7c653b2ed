"""Help for the focused panel, and a list of all keys."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from rich.style import Style
from textual.app import ComposeResult
from textual.binding import Binding
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from cockpit.data.filter import Vocabulary
from cockpit.data.format import clean
from cockpit.tui.dialogs.dialog import Dialog
from cockpit.tui.drawing.strips import StripLine, blank
from cockpit.tui.drawing.theme import Palette, palette
from cockpit.tui.keys.action import Action, spelled

OVER_SSH = "Over a slow connection, `ssh -C` compresses the output about twentyfold."
FILTERS = (
    "Comparisons = != < <= > >= with + - * /, joined by & | ! ( ); a rank without the value does not match."
)
GLYPHS = "✓ good   ! needs attention   ✗ lost or broken   · no data (not zero)"


LEAST_WIDTH = 20  # columns at which text is wrapped, at least


class Page(ScrollView, can_focus=True):
    """Wrapped text. Only the visible lines are drawn."""

    def __init__(self, text: "Help") -> None:
        super().__init__(id="dialog")
        self._text = text
        self._drawn: tuple[object, ...] = ()
        self._lines: list[StripLine] = []

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        self._draw(width)
        return len(self._lines)

    def _draw(self, width: int) -> None:
        """Wrap the text to `width` columns minus the width of the scroll bar."""
        width -= self.styles.scrollbar_size_vertical
        drawn = width, self.app.theme
        if drawn != self._drawn:
            self._drawn = drawn
            self._lines = list(self._text.lines(max(LEAST_WIDTH, width), palette(self.app.theme)))
            self.virtual_size = Size(width, len(self._lines))

    def render_line(self, y: int) -> Strip:
        style, width = palette(self.app.theme).text, self.size.width
        y += self.scroll_offset.y
        return self._lines[y].strip(width, style) if y < len(self._lines) else blank(width, style)


class Help(Dialog[None]):
    """A modal page with help text."""

    BINDINGS: ClassVar[list[Binding]] = [  # type: ignore[assignment]
        Binding("escape,question_mark,f1,q,enter", "dismiss", "close", id="help.close")
    ]

    def __init__(
        self,
        title: str,
        about: str,
        sections: Mapping[str, Sequence[Action]],
        keymap: Mapping[str, str] | None = None,
        filter_names: Vocabulary | None = None,
    ) -> None:
        """`sections`: the actions to list under each heading; `keymap`: the user's keys by action id."""
        super().__init__()
        self._title, self._about, self._sections = title, about, sections
        self._keymap, self._filter_names = keymap or {}, filter_names

    def compose(self) -> ComposeResult:
        page = Page(self)
        page.border_title, page.border_subtitle = f"Help · {self._title}", "esc closes"
        yield page

    def lines(self, width: int, colours: Palette) -> Iterator[StripLine]:
        """The lines of the page, wrapped to `width` columns."""
        for paragraph in (*self._about.splitlines(), "", GLYPHS):
            yield from _wrapped(paragraph, width, colours.text)
        for name, actions in self._sections.items():
            if not actions:
                continue
            yield from _heading(name, colours)
            for action in actions:
                keys = spelled(self._keymap.get(action.id, action.keys))
                yield from _entry(keys, 12, action.about, width, colours)
        if names := self._filter_names:
            yield from _heading("Filter (/)", colours)
            yield from _wrapped(f"  {FILTERS}", width, colours.dim)
            for group in (names.numbers, names.texts, names.flags, names.statistics):
                for name, about in group.items():
                    yield from _entry(name, 18, about, width, colours)
        yield StripLine()
        yield from _wrapped(OVER_SSH, width, colours.dim)


def _heading(name: str, colours: Palette) -> Iterator[StripLine]:
    yield StripLine()
    yield StripLine().add(name, colours.accent)


def _entry(name: str, room: int, about: str, width: int, colours: Palette) -> Iterator[StripLine]:
    """The lines of one help entry: `name` in a column of `room` cells, and to the right of it the explanation `about`,
    wrapped."""
    line = StripLine().add(f"  {name:<{room}}", colours.strong)
    if line.width > 2 + room:
        line.add(" ", colours.strong)
    beside = 2 + room
    first, *rest = textwrap.wrap(clean(about), max(LEAST_WIDTH, width - line.width)) or [""]
    yield line.add(first, colours.dim)
    for part in textwrap.wrap(" ".join(rest), max(LEAST_WIDTH, width - beside)):
        yield StripLine().pad_to(beside, colours.dim).add(part, colours.dim)


def _wrapped(text: str, width: int, style: Style) -> Iterator[StripLine]:
    for part in textwrap.wrap(text, width) or [""]:
        yield StripLine().add(part, style)
