"""The line that shows the position in the recording during a replay. The word PLAYBACK distinguishes a replay from a
live run."""

import time

from textual.strip import Strip
from textual.widget import Widget

from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.link import PlaybackPosition
from cockpit.data.store import Store
from cockpit.tui.drawing.strips import StripLine, blank
from cockpit.tui.drawing.theme import Palette, palette

SHORTEST = 8  # minimum width of the track; if fewer cells are free, the line has no track


class Scrubber(Widget):
    """The widget that draws the line, such as
    ``PLAYBACK ▶ 4× ━━━━━━●────── step 120 · 14:03:22 · 0:45 / 2:10``."""

    def __init__(self) -> None:
        super().__init__(id="scrubber")
        self._strip = Strip([])

    def update_from(self, store: Store) -> None:
        """Redraw if the line changed. The caller holds the store's lock."""
        width = self.size.width
        if not self.is_attached or width < 2:
            return
        colours = palette(self.app.theme)
        strip = scrub_line(store, width, colours).strip(width, colours.text)
        if strip != self._strip:
            self._strip = strip
            self.refresh()

    def render_line(self, y: int) -> Strip:
        if y == 0 and self._strip.cell_length == self.size.width:
            return self._strip
        return blank(self.size.width, palette(self.app.theme).text)


def scrub_line(store: Store, width: int, colours: Palette) -> StripLine:
    playback_position = store.playback_position
    line = StripLine().add(" PLAYBACK ", colours.cursor)
    if playback_position is None:
        return line.add(" opening the recording", colours.dim)
    how = "‖ paused" if playback_position.paused else f"▶ {playback_position.speed:g}×"
    line.add(f" {how:<9}", colours.strong)
    position = _position_text(store, playback_position)
    note = " · no rank records" if playback_position.thinned else ""
    room = width - line.width - len(position) - len(note) - 3
    if room >= SHORTEST:
        done = round(playback_position.share * (room - 1))
        line.add("━" * done, colours.accent).add("●", colours.strong).add(
            "─" * (room - 1 - done), colours.faint
        )
        line.add("  ", colours.text)
    line.add(position, colours.text)
    return line.add(note, colours.level[Level.WARN])


def _position_text(store: Store, playback_position: PlaybackPosition) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(playback_position.at_s))
    gone, whole = (
        playback_position.at_s - playback_position.first_s,
        playback_position.last_s - playback_position.first_s,
    )
    return f"step {format.grouped(store.step)} · {at} · {_minutes(gone)} / {_minutes(whole)}"


def _minutes(seconds: float) -> str:
    """A duration as ``1:02:03`` or ``2:03``."""
    whole = max(0, int(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
