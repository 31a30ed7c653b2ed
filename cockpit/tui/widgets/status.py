"""The status lines at the top of each screen: the state of the run, and the diagnosis."""

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Diagnosis, Level, diagnosis
from cockpit.data.diagnosis.status import ALWAYS, StatusField, fitting, state_field, status_fields
from cockpit.data.filter import matches
from cockpit.data.store import Store
from cockpit.tui.drawing.strips import StripLine, blank
from cockpit.tui.drawing.theme import Palette, palette
from cockpit.tui.session import Selection

_GAP = " · "
TALL = 30  # height of a terminal, in rows, from which on the diagnosis may take LONG lines
SHORT, LONG = 3, 4  # most lines of the diagnosis


class Status(Widget):
    """One line with the state of the run, and the lines of the diagnosis: its evidence and the recommended action."""

    def __init__(self, operator: bool, selection: Selection) -> None:
        super().__init__(id="status")
        self._operator, self._selection = operator, selection
        self._strips: list[Strip] = []

    def update_from(self, store: Store) -> None:
        """Redraw if a line changed. The caller holds the store's lock."""
        width = self.size.width
        if not self.is_attached or width < 2:
            return
        colours = palette(self.app.theme)
        lines = [
            verdict_line(store, self._operator, self._selection, width, colours),
            *diagnosis_lines(store, width, colours, SHORT if self.app.size.height < TALL else LONG),
        ]
        strips = [line.strip(width, colours.text) for line in lines]
        if len(strips) != len(self._strips):
            self.styles.height = len(strips)
        if strips != self._strips:
            self._strips = strips
            self.refresh()

    def render_line(self, y: int) -> Strip:
        if y < len(self._strips) and self._strips[y].cell_length == self.size.width:
            return self._strips[y]
        return blank(self.size.width, palette(self.app.theme).text)


def verdict_line(
    store: Store, operator: bool, selection: Selection, width: int, colours: Palette
) -> StripLine:
    """The first line: the state of the run, the selected step and the filter, and the most important fields that
    fit.
    """
    state, *items = fitting(
        [state_field(store), *selected_fields(store, selection), *status_fields(store, operator)],
        lambda fields: _width(fields) <= width,
    )
    level, text = state.level or Level.NOTE, state.text
    if (excess := _width([state, *items]) - width) > 0:  # the words after it, such as SIM, are shown whole
        text = f"{text[: max(1, len(text) - excess - 1)]}…"
    line = StripLine().add(f" {level.value} {text} ", colours.badge[level])
    for item in items:
        style: Style = colours.level[item.level] if item.level else colours.text
        line.add(_GAP[1:] if item is items[0] else _GAP, colours.faint).add(item.text, style)
    return line


def selected_fields(store: Store, selection: Selection) -> Iterator[StatusField]:
    """Two fields: the selected step, and the filter with the number of ranks that match. A selected step and a filter
    both restrict the data that the screens show."""
    if selection.step is not None:
        yield StatusField(f"AT STEP {format.grouped(selection.step)}", ALWAYS, Level.WARN)
    if selection.filter:
        count = len(matches(store, selection.filter, selection.step).ranks)
        yield StatusField(f"FILTER {count}/{store.world}", ALWAYS, Level.WARN)


def diagnosis_lines(store: Store, width: int, colours: Palette, most: int = SHORT) -> list[StripLine]:
    """The lines of the diagnosis. `most`: maximum number of lines. If the recommended action would be cut off, it is
    put on its own lines, and the finding is shortened instead."""
    found = diagnosis(store)
    calm = found.level in (Level.GOOD, Level.NOTE)
    text = colours.text if calm else colours.level[found.level]
    mark = StripLine().add(f" {found.level.value} ", colours.level[found.level])
    indent = mark.width
    first, *more = [found.sentence] if calm else _broken(found, max(1, width - indent), most)
    return [mark.add(first, text), *(StripLine().pad_to(indent, text).add(line, text) for line in more)]


def _broken(found: Diagnosis, room: int, most: int) -> list[str]:
    """The sentence of a diagnosis in at most `most` lines of `room` cells."""
    if cell_len(found.sentence) <= room:
        return [found.sentence]
    next_step = f"→ {found.advice}"
    if not found.advice or max(cell_len(found.finding), cell_len(next_step)) > room:
        lines = format.wrapped(found.sentence, room)
        if len(lines) <= 2 or not found.advice:
            return _cut(lines, found.sentence, room, most)
    advised = _cut(format.wrapped(next_step, room), next_step, room, most - 1)
    finding = format.wrapped(found.finding, room)
    return [*_cut(finding, found.finding, room, most - len(advised)), *advised]


def _cut(lines: list[str], text: str, room: int, most: int) -> list[str]:
    """`lines`, which are `text` wrapped at `room` cells; if there are more than `most` lines, only the first `most`,
    with an ellipsis at the end."""
    if len(lines) <= most:
        return lines
    return format.wrapped(text, room, max_lines=most, placeholder=" …")


def _width(fields: Sequence[StatusField]) -> int:
    state, *items = fields
    return 4 + cell_len(state.text) + sum(len(_GAP) + cell_len(item.text) for item in items)
