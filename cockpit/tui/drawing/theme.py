"""Colours: two themes, each with the table of styles that all panels use.

Panels look styles up in this table. Each status colour also has a glyph, and the ramps are ordered by
lightness, so that a screen without colour stays readable: brighter is worse.
"""

from dataclasses import dataclass
from functools import lru_cache

from rich.style import Style
from textual.theme import Theme

from cockpit.data.diagnosis.diagnosis import Level

DARK = Theme(
    name="cockpit-dark",
    dark=True,
    primary="#7aa2c9",
    secondary="#8d7bb8",
    accent="#7aa2c9",
    warning="#e5a84b",
    error="#e8646e",
    success="#7fb685",
    foreground="#cdd4dc",
    background="#10141a",
    surface="#10141a",
    panel="#1a2029",
    variables={
        "border": "#2b333e",
        "border-blurred": "#2b333e",
        "footer-background": "#10141a",
        "footer-key-foreground": "#7aa2c9",
        "footer-description-foreground": "#8591a0",
        "block-cursor-background": "#2b3b4d",
        "block-cursor-foreground": "#ffffff",
    },
)

LIGHT = Theme(
    name="cockpit-light",
    dark=False,
    primary="#2f6ea3",
    secondary="#6d55a3",
    accent="#2f6ea3",
    warning="#9a5b00",
    error="#b3202f",
    success="#2c7a49",
    foreground="#22272e",
    background="#fbfaf7",
    surface="#fbfaf7",
    panel="#f0eee8",
    variables={
        "border": "#d5d3cc",
        "border-blurred": "#d5d3cc",
        "footer-background": "#fbfaf7",
        "footer-key-foreground": "#2f6ea3",
        "footer-description-foreground": "#626a75",
        "block-cursor-background": "#d4e4f2",
        "block-cursor-foreground": "#10141a",
    },
)

THEMES = {theme.name: theme for theme in (DARK, LIGHT)}


# Lower edges of the bins of `Palette.deviation`, as deviation from the median of the peers. They are constants, so that
# a colour keeps its meaning while the numbers change.
DEVIATION_EDGES = (-0.25, -0.10, -0.04, 0.04, 0.10, 0.25, 0.50)


@dataclass(frozen=True)
class Palette:
    """All styles of one theme."""

    text: Style
    strong: Style
    dim: Style
    faint: Style
    accent: Style
    level: dict[Level, Style]
    badge: dict[Level, Style]  # the state of the run, readable from two metres
    # one style per bin of DEVIATION_EDGES, from blue through neutral to orange
    deviation: tuple[Style, ...]
    ramp: tuple[Style, ...]  # cividis-like, dark to bright
    forward: tuple[Style, Style]  # alternating by micro-batch
    backward: tuple[Style, Style]
    weight: tuple[Style, Style]
    curve: Style
    curve_alt: Style
    mark: Style
    cursor: Style

    @staticmethod
    def bin(deviation: float) -> int:
        """Index into `deviation` for a deviation (0.1 = ten per cent above the median)."""
        return sum(deviation >= edge for edge in DEVIATION_EDGES)


_HUES: dict[str, dict[str, list[str]]] = {
    "cockpit-dark": {
        "ink": ["#cdd4dc", "#ffffff", "#8591a0", "#465160"],
        "deviation": ["#3f74b8", "#456892", "#47597a", "#4a5562", "#8a6f4a", "#bf8440", "#e8973a", "#ffb35c"],
        "ramp": [
            "#1f3a63",
            "#37476b",
            "#4f566c",
            "#66676f",
            "#7f7a70",
            "#9b8f67",
            "#bba556",
            "#dcbc41",
            "#fee838",
        ],
        "blocks": ["#45a9a9", "#2f8f8f", "#a08bd0", "#8672b5", "#b8892f", "#9c7a20"],
        "on_block": ["#0b1216"],
        "curve": ["#8ab4dc", "#9fc39a", "#e5a84b"],
        "cursor": ["#2b3b4d"],
    },
    "cockpit-light": {
        "ink": ["#22272e", "#000000", "#626a75", "#b5b8bb"],
        "deviation": ["#1f5fa8", "#5a8bbf", "#93b1cf", "#c3c7cb", "#dcb98a", "#d58f3c", "#c46a10", "#9c4600"],
        "ramp": [
            "#fdf0a6",
            "#e8d67f",
            "#cbbb72",
            "#aaa06f",
            "#8c886f",
            "#716f6d",
            "#58596b",
            "#3d4669",
            "#1f3a63",
        ],
        "blocks": ["#57c7c2", "#86d6d1", "#b9a8e0", "#d2c7ee", "#e2b98f", "#eed2b6"],
        "on_block": ["#10201f"],
        "curve": ["#2f6ea3", "#2c7a49", "#9a5b00"],
        "cursor": ["#d4e4f2"],
    },
}


@lru_cache(maxsize=8)
def palette(theme_name: str) -> Palette:
    """The styles of a theme. A theme that is built into Textual gets the styles of the dark theme."""
    theme = THEMES.get(theme_name, DARK)
    hues = _HUES[theme.name]
    background = theme.background or "#000000"

    def ink(colour: str, bold: bool = False) -> Style:
        return Style(color=colour, bgcolor=background, bold=bold)

    def block(colour: str) -> Style:
        return Style(color=hues["on_block"][0], bgcolor=colour)

    def badge(colour: str | None) -> Style:
        return Style(color=background, bgcolor=colour or text, bold=True)

    text, strong, dim, faint = hues["ink"]
    blocks = [block(colour) for colour in hues["blocks"]]
    curve, curve_alt, mark = hues["curve"]
    return Palette(
        text=ink(text),
        strong=ink(strong, bold=True),
        dim=ink(dim),
        faint=ink(faint),
        accent=ink(theme.primary),
        level={
            Level.GOOD: ink(theme.success or text),
            Level.NOTE: ink(dim),
            Level.WARN: ink(theme.warning or text),
            Level.BAD: ink(theme.error or text, bold=True),
        },
        badge={
            Level.GOOD: badge(theme.success),
            Level.NOTE: badge(dim),
            Level.WARN: badge(theme.warning),
            Level.BAD: badge(theme.error),
        },
        deviation=tuple(ink(colour) for colour in hues["deviation"]),
        ramp=tuple(ink(colour) for colour in hues["ramp"]),
        forward=(blocks[0], blocks[1]),
        backward=(blocks[2], blocks[3]),
        weight=(blocks[4], blocks[5]),
        curve=ink(curve),
        curve_alt=ink(curve_alt),
        mark=ink(mark),
        cursor=Style(color=strong, bgcolor=hues["cursor"][0], bold=True),
    )
