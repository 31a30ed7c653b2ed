"""Panel with the rank grid: one cell per rank, coloured by its deviation from its peers, and details of one rank."""

from typing import ClassVar

from textual import events
from textual.binding import Binding

from cockpit.data.filter import matching
from cockpit.data.link import LinkState
from cockpit.data.metrics import Metric, Readings
from cockpit.data.ranks.rank_facts import why
from cockpit.data.ranks.rank_levels import levels_of
from cockpit.data.store import Store, Topic
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.keys.screen_bindings import GRID, GRID_KEYS
from cockpit.tui.session import Selection
from cockpit.tui.widgets.ranks import view
from cockpit.tui.widgets.ranks.arrangement import NODE, Plan, plan, step_from
from cockpit.tui.widgets.ranks.base import RankPanel
from cockpit.tui.widgets.ranks.cells import Cells, legend
from cockpit.tui.widgets.ranks.inspector import inspector

WIDE_CELL = 19
INSPECTOR = 3


class RankGrid(RankPanel):
    """The panel that shows one metric of each rank, with the ranks grouped by one axis or by node."""

    TOPICS = frozenset({Topic.RANKS, Topic.PULSE})
    TITLE = "Ranks"
    OPENS = "ranks"
    NATURAL = True
    BINDINGS: ClassVar[list[Binding]] = GRID_KEYS  # type: ignore[assignment]
    ACTIONS = GRID
    ROOMY: ClassVar[int] = 20  # maximum number of lines that the grid requests
    INSPECTED: ClassVar[bool] = False  # whether another panel of a large screen shows the details of the rank
    HELP = (
        "One cell per rank. The number is from the newest step that all ranks have finished. The colour shows how far "
        "the rank's recent steps are from the median of its pipeline stage: orange is worse, blue is better. Own time "
        "is the step time minus the time spent waiting for other ranks. With collectives, each step takes as long as "
        "on the slowest rank, so own time shows which rank is slow. `c` changes what the colours compare: the peers, "
        "the rank's own earlier steps, or nothing (the value). `w` goes to the worst rank, and again to the next. `!` "
        "means slow or stalled, `✗` lost, and `·` no data. A cell with several ranks shows the worst of them."
    )

    def __init__(self, selection: Selection) -> None:
        super().__init__("ranks", selection)
        self._plan: Plan | None = None
        self._cells: Cells | None = None
        self._cells_key: object = None

    def choice(self) -> object:
        return super().choice(), self._details

    @property
    def _details(self) -> bool:
        """Whether the rank's details are drawn below the grid, because no panel beside the grid shows them."""
        return not self.INSPECTED or self.screen.has_class("-solo")

    def action_cursor(self, dx: int, dy: int) -> None:
        if self._plan:
            self.selection.rank = step_from(self._plan.grid, self.selection.rank, dx, dy)
            self.changed()

    def on_click(self, event: events.Click) -> None:
        at = event.get_content_offset(self)
        if at and self._plan and (slot := self._plan.at(at.x, at.y, 1 if self._plan.columns else 0)):
            self.selection.rank = slot[0]
            self.changed()

    # ---------------------------------------------------------------------------------------- drawing

    def title(self, store: Store) -> str:
        group = view.group_of(store, self.selection)
        by = f" · by {group}" if group else ""
        metric = view.metric_of(store, self.selection)
        unit = f", {metric.unit}" if metric.unit else ""
        return f"Ranks · {metric.title}{unit}{by}{view.step_text(store, self.selection, metric)}"

    def subtitle(self, store: Store) -> str:
        if not store.rank_records:
            return "low bandwidth: no records of single ranks"
        return "" if store.link is LinkState.ENDED else f"{store.coverage().strip()} reporting"

    def natural_height(self, store: Store) -> int:
        planned = self._planned(store, max(1, self.content_size.width), self.ROOMY)
        foot = 1 + (INSPECTOR if self._details else 0)
        return len(planned.rows) + foot + 2

    def _planned(self, store: Store, width: int, height: int) -> Plan:
        group = view.group_of(store, self.selection)

        def compute() -> Plan:
            found, columns = view.bands_of(store, group)
            return plan(found, columns, width, height, WIDE_CELL, nodes=group == NODE)

        return store.once(("plan", group, width, height), (Topic.GRID,), compute)

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        selection, against = self.selection, self.selection.against
        metric = view.metric_of(store, selection)
        readings = view.readings_of(store, selection, metric)
        # Hide the details if the ranks would otherwise share cells or lose their numbers.
        feet = (*((2 + INSPECTOR,) if self.INSPECTED else ()), 1 + INSPECTOR, 2) if self._details else (1,)
        plans = [(foot, self._planned(store, width, height - foot)) for foot in feet]
        foot, self._plan = min(plans, key=lambda choice: (choice[1].shared, not choice[1].wide))
        drawing = self._cells_of(store, metric, readings, colours)
        drawing.selected = selection.rank
        lines = drawing.rows(self._plan)
        gap = max(0, min(1, height - foot - len(lines)))
        lines += [StripLine()] * gap
        lines.append(legend(metric, readings, drawing.levels, store, self._plan, against, width, colours))
        if foot > 1:
            lines += inspector(store, metric, readings, selection.rank, width, colours)[: foot - 1]
        if foot > 1 + INSPECTOR and selection.rank in store.state.hellos:
            found = why(store, selection.rank, selection.step)
            style = colours.level[found.level]
            line = StripLine().add(f"{found.level.value} ", style)
            parts = ([(f" · {part}" if number else part, style)] for number, part in enumerate(found.parts))
            lines.append(line.add_fitting(width, *parts))
        return lines

    def _cells_of(self, store: Store, metric: Metric, readings: Readings, colours: Palette) -> Cells:
        """The `Cells` for `readings`. The `Cells` of the previous drawing are reused if only the cursor has moved."""
        selection, revisions = self.selection, store.revisions
        chosen = matching(store, selection.filter, selection.step)
        alarms = revisions[Topic.EVENTS], revisions[Topic.CURVES]  # alerts, lost ranks, shared cores
        key = (metric.key, selection.against, chosen, alarms, id(colours))
        if self._cells is None or self._cells.readings is not readings or key != self._cells_key:
            levels, digits = levels_of(store, metric, readings), len(str(store.world - 1))
            self._cells_key = key
            self._cells = Cells(
                metric, readings, levels, colours, selection.rank, digits, chosen, selection.against
            )
        return self._cells


class WholeGrid(RankGrid):
    """The grid on the ranks screen, without the details of the selected rank, which another panel shows."""

    INSPECTED = True
    ROOMY = 40
