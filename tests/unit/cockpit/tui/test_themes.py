"""Tests that text has enough contrast in every theme, on terminals with any number of colours."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from rich._palettes import STANDARD_PALETTE
from rich.color import Color, ColorSystem
from rich.console import Console
from rich.style import Style

from cockpit.data.diagnosis.diagnosis import Level
from cockpit.tui.drawing.contrast import READABLE, VISIBLE, channels, contrast, ink_on, readable
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import RAMP, SHADES, SOLID, Palette, palette
from cockpit.tui.drawing.themes import ALL_THEMES, HUES, THEMES, Depth, fitting, offered
from cockpit.tui.settings import load_settings, save_theme
from cockpit.tui.terminal.colours import depth_of

Palette16 = Sequence[tuple[int, int, int]]
VGA: Palette16 = [tuple(STANDARD_PALETTE[number]) for number in range(16)]  # type: ignore[misc]
XTERM: Palette16 = (
    *((0, 0, 0), (205, 0, 0), (0, 205, 0), (205, 205, 0), (0, 0, 238), (205, 0, 205), (0, 205, 205)),
    *((229, 229, 229), (127, 127, 127), (255, 0, 0), (0, 255, 0), (255, 255, 0), (92, 92, 255)),
    *((255, 0, 255), (0, 255, 255), (255, 255, 255)),
)
SIXTEEN = [name for name, hues in HUES.items() if hues.depth is Depth.SIXTEEN]


def of_text(colours: Palette) -> Iterator[tuple[str, Style]]:
    """Yields every style in which panels write text, with its name."""
    for role in ("text", "strong", "dim", "faint", "accent", "curve", "curve_alt", "mark", "cursor"):
        yield role, getattr(colours, role)
    for role in ("forward", "backward", "weight", "deviation_text"):
        yield from ((role, style) for style in getattr(colours, role))
    for level in Level:
        yield from ((f"{level} {role}", getattr(colours, role)[level]) for role in ("level", "badge"))
    yield "selected line", StripLine().add("x", colours.dim).on(colours.cursor)._parts[0][1]


def shown(colour: Color | None, system: ColorSystem, palette: Palette16 = VGA) -> str:
    """A colour as a terminal shows it, as ``#rrggbb``."""
    assert colour is not None
    found = colour.downgrade(system)
    if system is not ColorSystem.STANDARD:
        return found.get_truecolor().hex
    assert found.number is not None
    red, green, blue = palette[found.number]
    return f"#{red:02x}{green:02x}{blue:02x}"


def ratio(style: Style, system: ColorSystem = ColorSystem.TRUECOLOR, palette: Palette16 = VGA) -> float:
    return contrast(shown(style.color, system, palette), shown(style.bgcolor, system, palette))


@pytest.mark.parametrize("name", ALL_THEMES)
def test_all_text_of_a_theme_can_be_read(name: str) -> None:
    colours = palette(name)
    systems = [(ColorSystem.TRUECOLOR, VGA), (ColorSystem.EIGHT_BIT, VGA)]
    if name in SIXTEEN:
        systems += [(ColorSystem.STANDARD, VGA), (ColorSystem.STANDARD, XTERM)]
    for system, sixteen in systems:
        low = {role: ratio(style, system, sixteen) for role, style in of_text(colours)}
        # With 256 colours, a colour may differ by up to half a step from that of the theme.
        least = READABLE if system is not ColorSystem.EIGHT_BIT else 0.9 * READABLE
        assert not {role: round(found, 2) for role, found in low.items() if found < least}, system


@pytest.mark.parametrize("name", ALL_THEMES)
def test_prompts_titles_and_lists_can_be_read(name: str) -> None:
    """Textual draws prompts, titles and lists with the theme's variables."""
    theme, text = ALL_THEMES[name], HUES[name].ink[0]
    assert theme.background and theme.panel
    inks = [text, theme.primary, theme.warning, theme.error, theme.success, theme.secondary]
    inks += [theme.variables[name] for name in ("text-muted", "text-disabled", "footer-key-foreground")]
    for ground in (theme.background, theme.panel):
        assert min(contrast(ink or text, ground) for ink in inks) >= READABLE
    for state in ("block-cursor", "block-cursor-blurred"):
        pair = theme.variables[f"{state}-foreground"], theme.variables[f"{state}-background"]
        assert contrast(*pair) >= READABLE
        assert contrast(text, pair[1]) >= 4.0, "the second line of a selected command"


@pytest.mark.parametrize("name", ALL_THEMES)
def test_cells_are_seen_and_the_worst_most(name: str) -> None:
    colours = palette(name)
    for styles in (colours.deviation, colours.ramp):
        each = [ratio(style) for style in styles]
        assert min(each) >= 1.25 and each[-1] >= VISIBLE
    if HUES[name].depth is Depth.FULL:
        ramp = [ratio(style) for style in colours.ramp]
        assert all(a < b for a, b in pairwise(ramp)), "lightness orders the ramp"


def test_statuses_differ_by_glyph_and_selections_without_colour() -> None:
    assert len({level.value for level in Level}) == len(Level)
    colours = palette("cockpit-no-colour")
    plain = colours.text.without_color
    for style in (colours.cursor, *colours.badge.values(), colours.forward[0], colours.backward[0]):
        assert style.without_color != plain
    for one, other in (colours.forward, colours.backward, colours.weight):
        assert one.without_color != other.without_color, "neighbouring micro-batches are told apart"
    assert "underline" in ALL_THEMES["cockpit-no-colour"].variables["block-cursor-text-style"]


def test_cells_differ_by_density_where_colours_are_few() -> None:
    for name, hues in HUES.items():
        colours = palette(name)
        few = hues.depth is not Depth.FULL
        assert colours.fills == (SHADES if few else SOLID)
        assert len(colours.fills) == len(colours.deviation) and len(colours.ramp_fills) == len(colours.ramp)
        assert colours.halves is (hues.depth is not Depth.NONE)
    for densities in (SHADES, RAMP):
        order = ["░▒▓█".index(glyph) for glyph in densities]
        assert order == sorted(order) and order[0] < order[-1]


def test_themes_of_sixteen_colours_name_exactly_these() -> None:
    for name in SIXTEEN:
        for field in (
            "background",
            "panel",
            "accent",
            "ink",
            "status",
            "deviation",
            "ramp",
            "blocks",
            "cursor",
        ):
            value = getattr(HUES[name], field)
            for colour in [value] if isinstance(value, str) else value:
                assert shown(Color.parse(colour), ColorSystem.STANDARD) == colour, (name, field)


def test_the_theme_for_a_terminal() -> None:
    assert offered(Depth.FULL) == list(THEMES) and len(THEMES) >= 8
    assert fitting("cockpit-light", Depth.FULL) == "cockpit-light"
    assert fitting("solarized-light", Depth.SIXTEEN) == "cockpit-16-light"
    assert fitting("nord", Depth.SIXTEEN) == "cockpit-16-dark"
    assert fitting("nord", Depth.NONE) == fitting("no such", Depth.NONE) == "cockpit-no-colour"
    for term, colours, depth in (
        ("xterm", "", Depth.SIXTEEN),
        ("screen", "", Depth.SIXTEEN),
        ("xterm-256color", "", Depth.FULL),
        ("xterm", "truecolor", Depth.FULL),
    ):
        environment = {"TERM": term, "COLORTERM": colours}
        assert depth_of(Console(force_terminal=True, _environ=environment)) is depth


def test_a_theme_is_remembered_beside_other_settings(tmp_path: Path) -> None:
    path = tmp_path / "new" / "settings.toml"
    assert str(path) in save_theme("nord", path) and load_settings(path).theme == "nord"
    path.write_text("# mine\ntheme = 'cockpit-dark'  # old\n# end\n")
    save_theme("cockpit-light", path)
    assert path.read_text() == '# mine\ntheme = "cockpit-light"\n# end\n'
    assert save_theme("nord", tmp_path).startswith("not remembered: ")


def test_readable_moves_a_colour_no_farther_than_needed() -> None:
    assert readable("#ffffff", "#000000") == "#ffffff"
    moved = readable("#333333", "#000000")
    assert READABLE <= contrast(moved, "#000000") < READABLE + 0.6
    assert contrast("#000000", "#ffffff") == pytest.approx(21) and channels("#0a0b0c") == (10, 11, 12)
    assert (ink_on("#ffff00"), ink_on("#0000aa")) == ("#000000", "#ffffff")
