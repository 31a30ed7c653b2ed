"""The text of a screen that has no data for a run: why there is none, what the screen would show, and what the user can
do."""

from collections.abc import Sequence
from dataclasses import dataclass

from cockpit.data import format
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import Palette

LABEL = 15  # width of the first column, in cells
WIDEST = 96  # longer lines are hard to read


@dataclass(frozen=True)
class Guide:
    """The explanation on a screen for which the run reports no data. `about`: what the screen would show if the run
    reported data for it. `ways`: pairs of a situation and what the user can do in it."""

    about: str
    ways: Sequence[tuple[str, str]]


def guide_lines(why: str, guide: Guide, width: int, height: int, colours: Palette) -> list[StripLine]:
    """The text lines of a screen without data. `why`: the reason why it has none. The guide is shown below the reason
    if there is room for all of it."""
    parts = format.wrapped(why, max(20, width - 2))
    lines = [
        StripLine().add(f"{' ' if number else format.MISSING} {part}", colours.text)
        for number, part in enumerate(parts)
    ]
    room = min(width, WIDEST)
    rest = [StripLine()]
    rest += [
        StripLine().add(f"  {text}", colours.dim) for text in format.wrapped(guide.about, max(8, room - 2))
    ]
    rest.append(StripLine())
    for label, text in guide.ways:
        for number, part in enumerate(format.wrapped(text, max(8, room - 2 - LABEL))):
            line = StripLine().add(f"  {'' if number else label:<{LABEL}}", colours.accent)
            rest.append(line.add(part, colours.text))
    return lines + rest if len(lines) + len(rest) <= height else lines
