"""The styles of each theme, which all panels use.

A glyph accompanies each status colour. On a terminal with few or no colours, the density of a cell's glyph replaces its
colour: a denser glyph means a worse value.
"""

from dataclasses import dataclass
from functools import lru_cache

from rich.style import Style

from cockpit.data.diagnosis.diagnosis import Level
from cockpit.tui.drawing.contrast import readable
from cockpit.tui.drawing.themes import DEFAULT, HUES, Depth

# Lower edges of the bins of `Palette.deviation`, as deviation from the median of the peers. They are constants, so that
# a colour keeps its meaning while the numbers change.
DEVIATION_EDGES = (-0.25, -0.10, -0.04, 0.04, 0.10, 0.25, 0.50)


SHADES = "░░░░▒▓██"
RAMP = "░░░▒▒▒▓▓█"
SOLID = "████████"


@dataclass(frozen=True)
class Palette:
    """All styles of one theme."""

    text: Style
    strong: Style
    dim: Style
    faint: Style
    line: Style  # rules and axes, which are not text
    accent: Style
    level: dict[Level, Style]
    badge: dict[Level, Style]  # the state of the run, readable from a distance
    # one style per bin of DEVIATION_EDGES, from blue through neutral to orange
    deviation: tuple[Style, ...]
    deviation_text: tuple[Style, ...]  # the same colours, adjusted so that text in them is readable
    ramp: tuple[Style, ...]  # cividis-like, dark to bright
    fills: str  # the glyph of a cell, one per bin of `deviation`
    ramp_fills: str  # the glyph of a cell, one per bin of `ramp`
    halves: bool  # whether the two halves of a cell can differ in colour
    forward: tuple[Style, Style]  # alternating by micro-batch
    backward: tuple[Style, Style]
    weight: tuple[Style, Style]
    curve: Style
    curve_alt: Style
    mark: Style
    cursor: Style

    @staticmethod
    def bin(deviation: float) -> int:
        """The index in the colour scale `deviation` for a relative deviation from the median (0.1: 10 % above it)."""
        return sum(deviation >= edge for edge in DEVIATION_EDGES)


@lru_cache(maxsize=32)
def palette(theme_name: str) -> Palette:
    """The styles of a theme, or of the default theme if the name is unknown."""
    hues = HUES.get(theme_name, HUES[DEFAULT])
    colourless = hues.depth is Depth.NONE
    background = hues.background

    known: dict[Style, Style] = {}

    def ink(colour: str, bold: bool = False) -> Style:
        style = Style(color=colour, bgcolor=background, bold=bold)
        return known.setdefault(style, style)  # equal styles are one object, so that `is` can compare them

    def block(colour: str, number: int) -> Style:
        return Style(color=hues.on_block, bgcolor=colour, reverse=(number % 2 == 0) if colourless else None)

    def badge(colour: str) -> Style:
        return Style(color=background, bgcolor=colour, bold=True, reverse=True if colourless else None)

    text, strong, dim, faint, line = hues.ink
    good, warn, bad = hues.status
    blocks = [block(colour, number) for number, colour in enumerate(hues.blocks)]
    curve, curve_alt, mark = hues.curve
    return Palette(
        text=ink(text),
        strong=ink(strong, bold=True),
        dim=ink(dim),
        faint=ink(faint),
        line=ink(line),
        accent=ink(hues.accent),
        level={
            Level.GOOD: ink(good),
            Level.NOTE: ink(dim),
            Level.WARN: ink(warn),
            Level.BAD: ink(bad, bold=True),
        },
        badge={
            Level.GOOD: badge(good),
            Level.NOTE: badge(dim),
            Level.WARN: badge(warn),
            Level.BAD: badge(bad),
        },
        deviation=tuple(ink(colour) for colour in hues.deviation),
        deviation_text=tuple(ink(readable(colour, background)) for colour in hues.deviation),
        ramp=tuple(ink(colour) for colour in hues.ramp),
        fills=SOLID if hues.depth is Depth.FULL else SHADES,
        ramp_fills=SOLID + SOLID[:1] if hues.depth is Depth.FULL else RAMP,
        halves=not colourless,
        forward=(blocks[0], blocks[1]),
        backward=(blocks[2], blocks[3]),
        weight=(blocks[4], blocks[5]),
        curve=ink(curve),
        curve_alt=ink(curve_alt),
        mark=ink(mark),
        cursor=Style(
            color=hues.cursor[0], bgcolor=hues.cursor[1], bold=True, reverse=True if colourless else None
        ),
    )
