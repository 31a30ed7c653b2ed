"""Panel with the differences between this run and the compared runs: keys of the layout, knob values, and other
properties (facts) that the ranks reported in their hello messages."""

from cockpit.data import format
from cockpit.data.comparison.compared_runs import Difference, RunCurves
from cockpit.data.store import Store, Topic
from cockpit.tui.drawing.strips import StripLine, rule
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.session import Session
from cockpit.tui.widgets.curves.drawing import looks
from cockpit.tui.widgets.panel import Panel

HEADINGS = {"layout": "layout", "knob": "knobs now", "fact": "facts"}


class Differences(Panel):
    """The panel with one row for each layout key, knob or fact that differs between this run and a compared run."""

    TOPICS = frozenset({Topic.BOARD})
    TITLE = "Differences"
    EVERY = 3
    HELP = (
        "The differences between this run (A) and each compared run: first keys of the layout, with the overrides "
        "given at the start, then current knobs, then facts that are not in the layout. Equal values are not listed; "
        "`·` means that a run does not have the key."
    )

    def __init__(self, session: Session) -> None:
        super().__init__("differences")
        self.session = session

    def choice(self) -> object:
        return self.session.comparison.revision

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        comparison = self.session.comparison
        found = comparison.differences()
        if not found:
            why = f"reading {comparison.loading} ..." if comparison.loading else comparison.error
            text = why or "v compares this run with another one"
            return [StripLine().add(f"{format.MISSING} {text}", colours.faint)]
        lines: list[StripLine] = []
        for number, (run, rows) in enumerate(found, 1):
            lines += _table(number, run, rows, width, colours)
        if len(lines) > height:
            hidden = len(lines) - height + 1
            lines = [*lines[: height - 1], StripLine().add(f"+{hidden} more: cockpit compare", colours.faint)]
        return lines


def _table(
    number: int, run: RunCurves, rows: list[Difference], width: int, colours: Palette
) -> list[StripLine]:
    look = looks(colours)[number]
    title = f"{look.letter} {run.name}" + (" · simulated" if run.store.simulated else "")
    lines = [rule(title, width, look.style, colours.line)]
    if run.damage:
        lines.append(StripLine().add(f"incomplete: {run.damage[0]}", colours.dim))
    if not rows:
        return [*lines, StripLine().add("no difference in layout, knobs and facts", colours.dim)]
    key = min(max(len(row.key) for row in rows), width // 2)
    value = max(4, (width - key - 4) // 2)
    names = StripLine().add(" " * key, colours.dim).add("  " + "A".ljust(value), colours.curve)
    lines.append(names.add(f"  {look.letter}", look.style))
    kind = ""
    for row in rows:
        if row.kind != kind:
            lines.append(StripLine().add(HEADINGS[row.kind], colours.faint))
        kind = row.kind
        line = StripLine().add(_cut(row.key, key).ljust(key), colours.text)
        line.add("  " + _cut(row.values[0], value).ljust(value), colours.strong)
        lines.append(line.add("  " + _cut(row.values[1], value), colours.strong))
    return lines


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
