"""The overview: the verdict, and all its evidence at a glance."""

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.screen import Screen
from textual.widgets import Footer

from cockpit.actions import OVERVIEW_KEYS
from cockpit.store import Store
from cockpit.widgets.curve import LOSS, THROUGHPUT, Curve
from cockpit.widgets.events import Events
from cockpit.widgets.experts import ExpertLoad
from cockpit.widgets.grid import RankGrid
from cockpit.widgets.knobs import KnobSummary
from cockpit.widgets.panel import Panel
from cockpit.widgets.pipeline import Pipeline
from cockpit.widgets.status import Status
from cockpit.widgets.traffic import TrafficByAxis

# From the largest: least width and height, and the class its rules in the style sheet carry.
LAYOUTS = ((170, 48, "-wide"), (108, 32, "-medium"), (0, 0, "-narrow"))
ONLY_WIDE = {"throughput", "events"}


class Overview(Screen[None]):
    """Panels side by side where there is room, one at a time where there is not."""

    BINDINGS: ClassVar[list[Binding]] = OVERVIEW_KEYS  # type: ignore[assignment]
    AUTO_FOCUS = "#ranks"

    def __init__(self, operator: bool) -> None:
        super().__init__()
        self._operator = operator
        self._layout_class = ""
        self._maximised = False
        self._current = "ranks"

    def compose(self) -> ComposeResult:
        yield Status(self._operator)
        with Horizontal(id="panels"):
            with Vertical(id="left", classes="column"):
                yield RankGrid()
                yield ExpertLoad("experts")
                yield TrafficByAxis("traffic")
                yield Events("events")
            with Vertical(id="right", classes="column"):
                yield Pipeline("pipeline")
                yield Curve(LOSS)
                yield Curve(THROUGHPUT)
                yield KnobSummary("knobs")
        yield Footer(show_command_palette=False)

    # ------------------------------------------------------------------------------------- looking

    def look(self, store: Store, frozen: bool, tick: int) -> None:
        """Show what the store holds. Called with its lock held."""
        self.query_one(Status).look(store, frozen)
        for panel in self.query(Panel):
            if tick % panel.EVERY == 0 or not panel.drawn:
                panel.look(store)

    @property
    def panel(self) -> Panel:
        return self.query_one(f"#{self._current}", Panel)

    # ------------------------------------------------------------------------------------- layout

    def on_resize(self, event: events.Resize) -> None:
        width, height = event.size
        self._layout_class = next(name for w, h, name in LAYOUTS if width >= w and height >= h)
        self._arrange()

    def _arrange(self) -> None:
        for *_, name in LAYOUTS:
            self.set_class(name == self._layout_class, name)
        solo = self._maximised or self._layout_class == "-narrow"
        self.set_class(solo, "-solo")
        for panel in self.query(Panel):
            panel.set_class(panel.id == self._current, "-current")
        for column in self.query(".column"):
            column.set_class(bool(column.query(f"#{self._current}")), "-current")

    def _panels(self) -> list[str]:
        """Panels that this layout has, in reading order."""
        names = [panel.id or "" for panel in self.query(Panel)]
        return [name for name in names if self._layout_class != "-medium" or name not in ONLY_WIDE]

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        if isinstance(event.widget, Panel) and event.widget.id != self._current:
            self._current = event.widget.id or self._current
            self._arrange()

    # ------------------------------------------------------------------------------------- actions

    def action_turn(self, by: int) -> None:
        names = self._panels()
        at = names.index(self._current) if self._current in names else -1
        self._current = names[(at + by) % len(names)]
        self._arrange()
        self.panel.focus()

    def action_maximise(self) -> None:
        self._maximised = not self._maximised
        self._arrange()

    def action_back(self) -> None:
        self._maximised = False
        self._arrange()
