"""Checks of a drawn screen: lines fit, the status and the titles are not cut, the diagnosis shows its whole advice,
colours are readable, and the footer lists only keys that work."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.color import Color, ColorSystem
from rich.segment import Segment
from rich.style import Style
from textual.app import App
from textual.strip import Strip

from cockpit.data.diagnosis.diagnosis import Level, diagnosis
from cockpit.data.diagnosis.status import status_word
from cockpit.tui.app import CockpitApp
from cockpit.tui.drawing.contrast import contrast
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.themes import DEFAULT, Depth
from cockpit.tui.screens.run_screen import RunScreen
from cockpit.tui.widgets.footer import FittedFooter
from cockpit.tui.widgets.panel import Panel

LEAST_CONTRAST = 2.5
"""Minimum contrast of letters and digits with their background. The tests of the themes require more of each style."""


class CutLines:
    """Records the lines that `StripLine.strip` cut, because they were wider than their panel."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._strip = StripLine.strip

    def strip(self, line: StripLine, width: int, style: Style) -> Strip:
        if line.width > width > 0:
            self.found.append("".join(text for text, _ in line._parts))
        return self._strip(line, width, style)

    def take(self) -> list[str]:
        found, self.found = self.found, []
        return found


@dataclass(frozen=True)
class Colours:
    """The colours in which a terminal shows the screens. `depth`: how many colours the terminal can show. `theme`: the
    colour theme that the user has chosen. `fault`: a function that checks the colours of a segment (a text with one
    style); it returns a description of what is wrong with them, or ""."""

    name: str
    depth: Depth
    theme: str
    fault: Callable[[Segment], str]

    def show(self, app: CockpitApp) -> None:
        app.theme = self.theme
        app.show_colours_of(self.depth)


def _ends(segment: Segment) -> tuple[Color, Color] | None:
    """The text and background colours of a segment (a text with one style) that contains letters or digits; None for
    other segments, such as bars and lines, and for dim text."""
    style = segment.style
    if style is None or not any(letter.isalnum() for letter in segment.text):
        return None
    if style.color is None or style.bgcolor is None or style.dim:
        return None
    return (style.bgcolor, style.color) if style.reverse else (style.color, style.bgcolor)


def _readable(segment: Segment, system: ColorSystem | None = None) -> str:
    if (ends := _ends(segment)) is None:
        return ""
    ink, ground = ((colour.downgrade(system) if system else colour).get_truecolor().hex for colour in ends)
    return "" if contrast(ink, ground) >= LEAST_CONTRAST else f"{ink} on {ground}: {segment.text!r}"


def _of_256(segment: Segment) -> str:
    return _readable(segment, ColorSystem.EIGHT_BIT)


def _of_16(segment: Segment) -> str:
    return _readable(segment, ColorSystem.STANDARD)


def _without_colour(segment: Segment) -> str:
    style = segment.style
    used = [style.color, style.bgcolor] if style else []
    named = [one.name for one in used if one is not None and not one.is_default]
    return f"{named}: {segment.text!r}" if named else ""


MODES = (
    Colours("truecolor", Depth.FULL, DEFAULT, _readable),
    Colours("256", Depth.FULL, DEFAULT, _of_256),
    Colours("16", Depth.SIXTEEN, DEFAULT, _of_16),
    Colours("none", Depth.NONE, "cockpit-no-colour", _without_colour),
    Colours("light", Depth.FULL, "cockpit-light", _readable),
)


def picture_faults(app: CockpitApp, colours: Colours) -> Iterator[str]:
    """Yield a message for each error in the screen as drawn on the terminal. The colours of a screen below a dialog are
    not checked."""
    width, height = app.size
    strips = app.screen._compositor.render_strips()
    if len(strips) != height:
        yield f"{len(strips)} lines on a terminal of {height}"
    yield from (f"{s.cell_length} of {width} cells: {s.text!r}" for s in strips if s.cell_length != width)
    if isinstance(app.screen, RunScreen):
        parts = strips
        yield from _screen_faults(app, app.screen, [strip.text for strip in strips])
    else:
        areas = [child.region.intersection(app.screen.region) for child in app.screen.children]
        parts = [strips[y].crop(area.x, area.right) for area in areas for y in range(area.y, area.bottom)]
    yield from (fault for part in parts for segment in part if (fault := colours.fault(segment)))


def _screen_faults(app: CockpitApp, screen: RunScreen, lines: list[str]) -> Iterator[str]:
    store = app.shown
    with store.lock:
        word, found = status_word(store)[0], diagnosis(store)
    if word.split()[0] not in lines[0]:
        yield f"the state {word} is not in the first line: {lines[0]!r}"
    if "…" in lines[0]:
        yield f"the first line is cut: {lines[0]!r}"
    status = "".join("".join(lines[1 : screen._status.size.height]).split())
    wanted = found.advice or (found.sentence if found.level in (Level.GOOD, Level.NOTE) else "")
    if "".join(wanted.split()) not in status:
        yield f"“{wanted}” is not in {lines[1 : screen._status.size.height]}"
    for panel in screen.query(Panel):
        for side, title in (("title", panel.border_title), ("subtitle", panel.border_subtitle)):
            if panel.is_on_screen and len(str(title or "")) > panel.region.width - 6:
                yield f"the {side} of {panel.id} is cut: {title!r}"
    yield from _footer_faults(app, lines[-1])


def _footer_faults(app: App[Any], line: str) -> Iterator[str]:
    """The footer shows only keys that work now, and no more keys than fit."""
    active = {app.get_key_display(one.binding) for one in app.screen.active_bindings.values() if one.enabled}
    for key in app.screen.query_one(FittedFooter)._keys():
        if key.shown not in active:
            yield f"the footer shows {key.shown}, which does nothing"
        if f" {key.shown} {key.label}" not in line:
            yield f"{key.shown} {key.label} is not in the footer: {line!r}"
