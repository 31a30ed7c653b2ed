"""Builder for one line of terminal cells: text and styles become a Textual `Strip` of an exact width."""

from collections.abc import Sequence
from functools import lru_cache

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from cockpit.data.format import clean, wrapped

EIGHTHS = " ▁▂▃▄▅▆▇█"
LEFT_EIGHTHS = " ▏▎▍▌▋▊▉█"
LEAST_WRAPPED = 20  # columns at which text is wrapped, at least


class StripLine:
    """Builder of one line of terminal cells; adjacent texts of equal style are merged."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, Style]] = []
        self.width = 0

    def add(self, text: str, style: Style) -> "StripLine":
        if not text:
            return self
        if not text.isprintable():
            text = clean(text)
        if self._parts and self._parts[-1][1] == style:
            self._parts[-1] = (self._parts[-1][0] + text, style)
        else:
            self._parts.append((text, style))
        self.width += len(text) if text.isascii() else cell_len(text)
        return self

    def add_cells(self, glyph: str, count: int, style: Style) -> None:
        """Add a one-cell glyph `count` times. Do not pass text from a run as `glyph`, because `add_cells` skips the
        checks of `add`; for a map with thousands of cells, the checks would take most of the drawing time. `style` must
        come from the palette, in which equal styles are the same object."""
        if not count:
            return
        parts = self._parts
        if parts and parts[-1][1] is style:
            parts[-1] = (parts[-1][0] + glyph * count, style)
        else:
            parts.append((glyph * count, style))
        self.width += count

    def add_fitting(self, width: int, *items: Sequence[tuple[str, Style]]) -> "StripLine":
        """Add items until one does not fit in `width` cells. An item is a sequence of strings, each with a style. No
        item is cut, because a truncated number would be misleading."""
        for parts in items:
            if self.width + sum(cell_len(text) for text, _ in parts) > width:
                break
            for text, style in parts:
                self.add(text, style)
        return self

    def pad_to(self, width: int, style: Style, fill: str = " ") -> "StripLine":
        """Add spaces up to column `width`."""
        return self.add(fill * max(0, width - self.width), style)

    def on(self, background: Style) -> "StripLine":
        """A copy of the line in which `background` is added to the style of all its text."""
        line = StripLine()
        for text, style in self._parts:
            line.add(text, style + background)
        return line

    def extend(self, other: "StripLine") -> "StripLine":
        for text, style in other._parts:
            self.add(text, style)
        return self

    def strip(self, width: int, style: Style) -> Strip:
        """The line in exactly `width` cells: longer text is truncated with `…`, and shorter text is padded in
        `style`."""
        if self.width > width > 0:
            strip = Strip([Segment(text, part) for text, part in self._parts], self.width).crop(0, width - 1)
            return Strip.join([strip, Strip([Segment("…", style)], 1)])
        return Strip([Segment(text, part) for text, part in self._parts], self.width).adjust_cell_length(
            width, style
        )


def paragraph(
    text: str, width: int, style: Style, indent: int = 0, hanging: int | None = None
) -> list[StripLine]:
    """The text in lines of at most `width` cells: the first is indented by `indent` cells, the others by `hanging`."""
    after = indent if hanging is None else hanging
    lines = wrapped(
        clean(text), max(LEAST_WRAPPED, width), initial_indent=" " * indent, subsequent_indent=" " * after
    )
    return [StripLine().add(line, style) for line in lines]


def rule(title: str, width: int, label: Style, line: Style) -> StripLine:
    """A heading inside a horizontal line, such as ``── title ─────``."""
    return StripLine().add("── ", line).add(f"{title} ", label).pad_to(width, line, "─")


def named(text: str, width: int) -> str:
    """A name in a column of `width` cells, cut so that at least one blank follows. Wide characters fill two cells."""
    return f"{text[: width - 1]:<{width}}" if text.isascii() else f"{set_cell_size(text, width - 1)} "


def blank(width: int, style: Style) -> Strip:
    """An empty line in `style`. Textual's NO_COLOR filter fails on a Strip without a style."""
    return Strip.blank(width, style)


def bar(share: float, width: int) -> str:
    """A horizontal bar that fills `share` (0..1) of `width` cells, rounded to eighths of a cell."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (LEFT_EIGHTHS[rest] if rest else "")).ljust(width)[:width]


def column(share: float, rows: int) -> list[str]:
    """A vertical bar that fills `share` (0..1) of `rows` cells; returns the cells from top to bottom. At least one
    eighth of a cell is filled, so that zero looks different from missing data."""
    return list(_column(max(1, round(max(0.0, min(1.0, share)) * rows * 8)), rows))


@lru_cache(maxsize=512)
def _column(eighths: int, rows: int) -> tuple[str, ...]:
    return tuple(EIGHTHS[max(0, min(8, eighths - 8 * row))] for row in range(rows - 1, -1, -1))
