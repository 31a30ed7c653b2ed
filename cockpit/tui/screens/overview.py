"""The overview: the diagnosis of the run and all panels."""

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.screen import Screen

from cockpit.data.store import Store
from cockpit.tui.keys import OVERVIEW_KEYS
from cockpit.tui.widgets.events import EventsPanel
from cockpit.tui.widgets.experts import ExpertLoad
from cockpit.tui.widgets.footer import FittedFooter
from cockpit.tui.widgets.knobs import KnobSummary
from cockpit.tui.widgets.metric_curve import LOSS, THROUGHPUT, CurvePanel
from cockpit.tui.widgets.panel import Panel
from cockpit.tui.widgets.pipeline import PipelinePanel
from cockpit.tui.widgets.ranks.grid import RankGrid
from cockpit.tui.widgets.scrubber import Scrubber
from cockpit.tui.widgets.status import Status
from cockpit.tui.widgets.traffic import TrafficByAxis

# Minimum width and height of each layout, largest first, and its class in the style sheet.
LAYOUTS = ((170, 48, "-wide"), (108, 32, "-medium"), (0, 0, "-narrow"))
NOT_MEDIUM = {"throughput", "events"}  # hidden by the style sheet in the medium layout


class Overview(Screen[None]):
    """Panels side by side on a large terminal, one at a time on a small one."""

    BINDINGS: ClassVar[list[Binding]] = OVERVIEW_KEYS  # type: ignore[assignment]
    AUTO_FOCUS = "#ranks"

    def __init__(self, operator: bool, recorded: bool = False) -> None:
        super().__init__()
        self._scrubber = Scrubber() if recorded else None
        self._layout_class = ""
        self._zoomed = False
        self._current = "ranks"
        # The panels are attributes, because the timer also runs before they are mounted and after they are removed.
        self._status = Status(operator)
        self._left: list[Panel] = [
            RankGrid(),
            ExpertLoad("experts"),
            TrafficByAxis("traffic"),
            EventsPanel("events"),
        ]
        self._right: list[Panel] = [
            PipelinePanel("pipeline"),
            CurvePanel(LOSS),
            CurvePanel(THROUGHPUT),
            KnobSummary("knobs"),
        ]
        self._panels = {panel.id or "": panel for panel in self._left + self._right}

    def compose(self) -> ComposeResult:
        yield self._status
        if self._scrubber:
            yield self._scrubber
        with Horizontal(id="panels"):
            yield Vertical(*self._left, id="left", classes="column")
            yield Vertical(*self._right, id="right", classes="column")
        yield FittedFooter()

    # ------------------------------------------------------------------------------------- refresh

    def update_from(self, store: Store, frozen: bool, tick: int) -> None:
        """Update all panels from the store. The caller holds the store's lock."""
        self._status.update_from(store, frozen)
        if self._scrubber:
            self._scrubber.update_from(store)
        for panel in self._panels.values():
            if tick % panel.EVERY == 0 or not panel.drawn:
                panel.update_from(store)

    # ------------------------------------------------------------------------------------- layout

    def on_resize(self, event: events.Resize) -> None:
        width, height = event.size
        self._layout_class = next(name for w, h, name in LAYOUTS if width >= w and height >= h)
        self._arrange()

    def _arrange(self) -> None:
        for *_, name in LAYOUTS:
            self.set_class(name == self._layout_class, name)
        solo = self._zoomed or self._layout_class == "-narrow"
        self.set_class(solo, "-solo")
        for name, panel in self._panels.items():
            panel.set_class(name == self._current, "-current")
        for column in self.query(".column"):
            column.set_class(bool(column.query(f"#{self._current}")), "-current")

    def _reachable(self) -> list[str]:
        """Names of the panels in this layout, in reading order."""
        return [name for name in self._panels if self._layout_class != "-medium" or name not in NOT_MEDIUM]

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        if isinstance(event.widget, Panel) and event.widget.id != self._current:
            self._current = event.widget.id or self._current
            self._arrange()

    # ------------------------------------------------------------------------------------- actions

    def action_turn(self, by: int) -> None:
        names = self._reachable()
        at = names.index(self._current) if self._current in names else -1
        self._current = names[(at + by) % len(names)]
        self._arrange()
        self._panels[self._current].focus()

    def action_zoom(self) -> None:
        self._zoomed = not self._zoomed
        self._arrange()

    def action_back(self) -> None:
        self._zoomed = False
        self._arrange()
