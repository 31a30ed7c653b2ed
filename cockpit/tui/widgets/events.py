"""Panel with the run's log: the events, and each proposed change with its outcome."""

import time

from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.log.run_log import LogEntry, log_entries
from cockpit.data.store import Store, Topic
from cockpit.tui.drawing.strips import LEAST_WRAPPED, StripLine
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.session import Selection
from cockpit.tui.widgets.panel import Panel

LEVELS = {"info": Level.NOTE, "warning": Level.WARN, "error": Level.BAD}


class EventsPanel(Panel):
    """The panel with the newest entries of the run's log, the newest at the bottom."""

    TOPICS = frozenset({Topic.EVENTS})
    TITLE = "Events"
    OPENS = "log"
    HELP = "Events of the run, and each proposed change with its outcome."

    def __init__(self, selection: Selection, id: str = "events") -> None:
        super().__init__(id)
        self._selection = selection

    def choice(self) -> object:
        return self._selection.step

    def title(self, store: Store) -> str:
        return "Events · newest" if self._selection.step is not None else "Events"

    def subtitle(self, store: Store) -> str:
        return f"{len(log_entries(store))} in total" if store.state.events else ""

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        entries = log_entries(store)[-height:]
        if not entries:
            return [StripLine().add(f"{format.MISSING} no events yet", colours.faint)]
        lines: list[StripLine] = []
        for entry in reversed(entries):
            of_entry = self._lines(entry, width, colours)
            if lines and len(of_entry) + len(lines) > height:
                break
            lines = of_entry + lines
        return lines

    def _lines(self, entry: LogEntry, width: int, colours: Palette) -> list[StripLine]:
        """An entry in lines of `width` columns; if there is no room to wrap it, in one line, which the panel truncates.
        The sender of the entry, such as `hub` or a rank, is left out if it does not fit."""
        level = LEVELS.get(entry.level, Level.NOTE)
        clock = time.strftime("%H:%M:%S", time.localtime(entry.time_s))
        line = StripLine().add(f"{clock} ", colours.dim).add(f"{level.value} ", colours.level[level])
        at = line.width
        if width - at < LEAST_WRAPPED:
            return [line.add(entry.headline, colours.text)]
        first, *more = format.wrapped(entry.headline, width - at) or [""]
        lines = [line.add(first, colours.text)]
        lines += [StripLine().pad_to(at, colours.text).add(part, colours.text) for part in more]
        lines[-1].add_fitting(width, [(f" · {entry.source}", colours.faint)])
        return lines
