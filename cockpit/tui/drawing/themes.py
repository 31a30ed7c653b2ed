"""The colours of each theme, and the Textual themes made from them. `THEMES` are for terminals with 256 or more
colours: the cockpit's own themes, and well-known themes from Textual's registry, with colours adjusted until they are
readable. The themes with the depth `SIXTEEN` are for terminals with 16 colours, and use only these 16 colours. On such
a terminal, any other colour would be replaced by the nearest of the 16 colours, which could be the background colour.
The theme with the depth `NONE` uses no colours and marks differences with bold and reverse video.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from textual.theme import BUILTIN_THEMES, Theme

from cockpit.tui.drawing.contrast import ink_on, mix, readable


class Depth(Enum):
    """The number of colours that a terminal can show."""

    FULL = "256 or more colours"
    SIXTEEN = "16 colours"
    NONE = "no colours"


@dataclass(frozen=True)
class Hues:
    """The colours of one theme. `ink`: five colours, for normal, strong, dim and faint text, and for lines such as
    borders."""

    about: str
    dark: bool
    background: str
    panel: str  # background of prompts and notifications
    ink: tuple[str, str, str, str, str]
    accent: str
    second: str
    status: tuple[str, str, str]  # good, warning, bad
    deviation: tuple[str, ...]  # one per bin, from better (blue) through neutral to worse (orange)
    ramp: tuple[str, ...]  # nine, from low to high
    blocks: tuple[str, ...]  # forward, backward and weight, two of each
    on_block: str
    curve: tuple[str, str, str]  # curve, other curve, mark
    cursor: tuple[str, str]  # text and background
    depth: Depth = Depth.FULL


_DARK: Final = Hues(
    about="dark, quiet borders",
    dark=True,
    background="#10141a",
    panel="#1a2029",
    ink=("#cdd4dc", "#ffffff", "#98a4b2", "#7d8896", "#3a4452"),
    accent="#7aa2c9",
    second="#9686c0",
    status=("#7fb685", "#e5a84b", "#ee747d"),
    deviation=("#3f74b8", "#456892", "#47597a", "#4a5562", "#8a6f4a", "#bf8440", "#e8973a", "#ffb35c"),
    ramp=(
        *("#1f3a63", "#37476b", "#4f566c", "#66676f", "#7f7a70"),
        *("#9b8f67", "#bba556", "#dcbc41", "#fee838"),
    ),
    blocks=("#45a9a9", "#2f8f8f", "#a08bd0", "#8672b5", "#b8892f", "#a8842a"),
    on_block="#0b1216",
    curve=("#8ab4dc", "#9fc39a", "#e5a84b"),
    cursor=("#ffffff", "#2b4a6b"),
)

_LIGHT: Final = Hues(
    about="light",
    dark=False,
    background="#fbfaf7",
    panel="#f0eee8",
    ink=("#22272e", "#000000", "#535b66", "#666d77", "#cbc9c1"),
    accent="#2a659a",
    second="#6d55a3",
    status=("#226a3d", "#8a5200", "#b3202f"),
    deviation=("#1f5fa8", "#5a8bbf", "#93b1cf", "#c3c7cb", "#dcb98a", "#d58f3c", "#c46a10", "#9c4600"),
    ramp=(
        *("#e8d67f", "#d6c576", "#cbbb72", "#aaa06f", "#8c886f"),
        *("#716f6d", "#58596b", "#3d4669", "#1f3a63"),
    ),
    blocks=("#57c7c2", "#86d6d1", "#b9a8e0", "#d2c7ee", "#e2b98f", "#eed2b6"),
    on_block="#10201f",
    curve=("#2a659a", "#226a3d", "#8a5200"),
    cursor=("#10141a", "#b9d6ee"),
)

_CONTRAST: Final = replace(
    _DARK,
    about="dark, high contrast",
    background="#000000",
    panel="#1c1c1c",
    ink=("#ffffff", "#ffffff", "#d6d6d6", "#b4b4b4", "#8a8a8a"),
    accent="#8fd0ff",
    second="#d0b8ff",
    status=("#6dff9e", "#ffd75f", "#ff8a8a"),
    deviation=("#3f9bff", "#3f80c8", "#4f6a8c", "#6a6a6a", "#a07a30", "#d08a1c", "#ffa51f", "#ffc95c"),
    blocks=("#6fe0e0", "#3fb8b8", "#cdb8ff", "#a892e0", "#ffcf70", "#d8a940"),
    on_block="#000000",
    curve=("#8fd0ff", "#6dff9e", "#ffd75f"),
    cursor=("#ffffff", "#0050c8"),
)

_COLOUR_BLIND: Final = replace(
    # Okabe and Ito's colours, https://jfly.uni-koeln.de/color/, which are distinguishable with every kind of
    # colour blindness.
    _DARK,
    about="dark, no pair of red and green (Okabe-Ito)",
    accent="#56b4e9",
    second="#cc79a7",
    status=("#56b4e9", "#f0e442", "#ff8a3d"),
    deviation=("#2b8fd9", "#3a78ac", "#46627e", "#4a5562", "#8a6f3a", "#bd8a1e", "#e69f00", "#ffc94d"),
    blocks=("#56b4e9", "#3a96cc", "#e69f00", "#c98a00", "#cfa0bd", "#b887a4"),
    curve=("#56b4e9", "#e0a7c4", "#f0e442"),
)

BLACK, RED, BROWN, BLUE, MAGENTA = "#000000", "#aa0000", "#aa5500", "#0000aa", "#aa00aa"
CYAN, SILVER, GREY, WHITE = "#00aaaa", "#aaaaaa", "#555555", "#ffffff"
LIGHT_RED, LIGHT_GREEN, YELLOW, LIGHT_BLUE = "#ff5555", "#55ff55", "#ffff55", "#5555ff"
PINK, LIGHT_CYAN = "#ff55ff", "#55ffff"
"""The sixteen colours with the values that Rich uses, so that Rich maps each of them exactly."""

_SIXTEEN_DARK: Final = Hues(
    about="dark, for terminals with 16 colours",
    dark=True,
    background=BLACK,
    panel=BLACK,
    ink=(WHITE, WHITE, SILVER, SILVER, GREY),
    accent=LIGHT_CYAN,
    second=PINK,
    status=(LIGHT_GREEN, YELLOW, LIGHT_RED),
    deviation=(LIGHT_BLUE, LIGHT_BLUE, CYAN, GREY, SILVER, BROWN, YELLOW, YELLOW),
    ramp=(GREY, GREY, LIGHT_BLUE, LIGHT_BLUE, CYAN, SILVER, SILVER, YELLOW, YELLOW),
    blocks=(CYAN, LIGHT_CYAN, PINK, SILVER, LIGHT_GREEN, YELLOW),
    on_block=BLACK,
    curve=(LIGHT_CYAN, LIGHT_GREEN, YELLOW),
    cursor=(WHITE, BLUE),
    depth=Depth.SIXTEEN,
)

_SIXTEEN_LIGHT: Final = Hues(
    about="light, for terminals with 16 colours",
    dark=False,
    background=WHITE,
    panel=WHITE,
    ink=(BLACK, BLACK, BLACK, BLACK, SILVER),  # grey and yellow look very different from terminal to terminal
    accent=BLUE,
    second=MAGENTA,
    status=(BLUE, MAGENTA, RED),
    deviation=(BLUE, BLUE, LIGHT_BLUE, SILVER, GREY, MAGENTA, RED, RED),
    ramp=(SILVER, SILVER, CYAN, CYAN, LIGHT_BLUE, LIGHT_BLUE, BLUE, BLUE, BLACK),
    blocks=(CYAN, LIGHT_CYAN, PINK, SILVER, LIGHT_GREEN, YELLOW),
    on_block=BLACK,
    curve=(BLUE, RED, MAGENTA),
    cursor=(BLACK, LIGHT_CYAN),
    depth=Depth.SIXTEEN,
)


def _borrowed(theme: Theme) -> Hues:
    """The colours of a theme from Textual's registry. The colours for text and status are adjusted until they are
    readable. The colour scales are taken from the cockpit's own themes, because these scales are ordered by lightness.
    """
    base = _DARK if theme.dark else _LIGHT
    background = theme.background or base.background
    text = readable(theme.foreground or base.ink[0], background, 7.0)
    panel = mix(background, text, 0.06)  # the background on which text is harder to read
    dim, faint = (
        readable(mix(text, panel, share), panel, least) for share, least in ((0.2, 5.4), (0.45, 4.6))
    )
    accent = readable(theme.primary, panel)
    status = tuple(
        readable(own or usual, panel)
        for own, usual in zip((theme.success, theme.warning, theme.error), base.status, strict=True)
    )
    good, warn, bad = status
    cursor = mix(background, accent, 0.25)
    return replace(
        base,
        about=f"{'dark' if theme.dark else 'light'}, the colours of {theme.name}",
        background=background,
        panel=panel,
        ink=(text, ink_on(background), dim, faint, mix(background, text, 0.22)),
        accent=accent,
        second=readable(theme.secondary or theme.primary, panel),
        status=(good, warn, bad),
        deviation=tuple(readable(one, background, 1.3) for one in base.deviation),
        ramp=tuple(readable(one, background, 1.3) for one in base.ramp),
        curve=(accent, good, warn),
        cursor=(ink_on(cursor), cursor),
    )


_NORD: Final = replace(BUILTIN_THEMES["nord"], background="#2a2e39")
"""Darker than Nord's own background, for which the nearest of 256 colours is a light teal."""

_BORROWED: Final = (
    _NORD,
    *(BUILTIN_THEMES[n] for n in ("gruvbox", "dracula", "tokyo-night", "solarized-dark", "solarized-light")),
)

HUES: Final = {
    "cockpit-dark": _DARK,
    "cockpit-light": _LIGHT,
    "cockpit-contrast": _CONTRAST,
    "cockpit-colour-blind": _COLOUR_BLIND,
    **{theme.name: _borrowed(theme) for theme in _BORROWED},
    "cockpit-16-dark": _SIXTEEN_DARK,
    "cockpit-16-light": _SIXTEEN_LIGHT,
    "cockpit-no-colour": replace(_DARK, about="no colours", depth=Depth.NONE),
}
DEFAULT: Final = "cockpit-dark"


def _theme(name: str, hues: Hues) -> Theme:
    text, _, dim, faint, line = hues.ink
    good, warn, bad = hues.status
    ink, cursor = hues.cursor
    more = " underline" if hues.depth is Depth.NONE else ""
    return Theme(
        name=name,
        dark=hues.dark,
        primary=hues.accent,
        secondary=hues.second,
        accent=hues.accent,
        warning=warn,
        error=bad,
        success=good,
        foreground=text,
        background=hues.background,
        surface=hues.background,
        panel=hues.panel,
        variables={
            "border": line,
            "border-blurred": line,
            "text-muted": dim,
            "text-disabled": faint,
            "footer-background": hues.background,
            "footer-key-foreground": hues.accent,
            "footer-description-foreground": dim,
            "block-cursor-background": cursor,
            "block-cursor-foreground": ink,
            "block-cursor-text-style": f"bold{more}",
            "block-cursor-blurred-background": cursor,
            "block-cursor-blurred-foreground": ink,
            "block-cursor-blurred-text-style": f"bold{more}",
        },
    )


ALL_THEMES: Final = {name: _theme(name, hues) for name, hues in HUES.items()}
THEMES: Final = {name: theme for name, theme in ALL_THEMES.items() if HUES[name].depth is Depth.FULL}
"""The themes that a user may choose."""


def offered(depth: Depth) -> list[str]:
    """The names of the themes that a terminal can show."""
    return [name for name, hues in HUES.items() if hues.depth is depth]


def fitting(name: str, depth: Depth) -> str:
    """The theme `name` if the terminal can show it. Otherwise the first theme that the terminal can show and that has
    the same kind of background, dark or light."""
    names = offered(depth)
    if name in names:
        return name
    dark = HUES[name].dark if name in HUES else True
    return next((one for one in names if HUES[one].dark is dark), names[0])
