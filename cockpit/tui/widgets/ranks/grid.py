"""Panel with the rank grid: one cell per rank, coloured by its deviation from its peers, and details of one rank."""

from typing import ClassVar

from textual import events
from textual.binding import Binding

from cockpit.data.filter import matching
from cockpit.data.metrics import Metric, available, read
from cockpit.data.rank_levels import levels_of
from cockpit.data.store import LinkState, Store, Topic
from cockpit.tui.keys import GRID, GRID_KEYS
from cockpit.tui.session import Selection
from cockpit.tui.strips import StripLine
from cockpit.tui.theme import Palette
from cockpit.tui.widgets.panel import Panel
from cockpit.tui.widgets.ranks.arrangement import Coords, Plan, axes_of, bands, plan, step_from
from cockpit.tui.widgets.ranks.cells import Cells, legend
from cockpit.tui.widgets.ranks.inspector import inspector

WIDE_CELL = 19
INSPECTOR = 3
ROOMY = 20  # maximum lines that the grid requests


class RankGrid(Panel):
    """The panel that shows one metric of each rank, with the ranks grouped by one axis of the grid."""

    TOPICS = frozenset({Topic.RANKS, Topic.PULSE})
    TITLE = "Ranks"
    OPENS = "ranks"
    NATURAL = True
    BINDINGS: ClassVar[list[Binding]] = GRID_KEYS  # type: ignore[assignment]
    ACTIONS = GRID
    HELP = (
        "One cell per rank. The number is from the newest step that all ranks have finished; the colour shows how far "
        "the rank's recent steps are from the median of its pipeline stage: orange is worse, blue is better. "
        "Own time is the step time minus the time spent waiting for other ranks. With collectives, each step takes "
        "as long as on the slowest rank, so own time shows which rank is slow. "
        "`!` slow or stalled, `✗` lost, `·` no data. A cell with several ranks shows the worst of them."
    )

    def __init__(self, selection: Selection) -> None:
        super().__init__("ranks")
        self.selection = selection
        self.group: str | None = None
        self._plan: Plan | None = None

    # -------------------------------------------------------------------------------- choices

    def choice(self) -> object:
        selection = self.selection
        return selection.metric, self.group, selection.rank, selection.filter

    def _metric(self, store: Store) -> Metric:
        metrics = available(store)
        return next((metric for metric in metrics if metric.key == self.selection.metric), metrics[0])

    def _group(self, coords: dict[int, Coords]) -> str | None:
        axes = axes_of(coords)
        return self.group if self.group in axes else next(iter(axes), None)

    def action_metric(self, step: int = 1) -> None:
        with self._store.lock:
            keys = [metric.key for metric in available(self._store)]
        at = keys.index(self.selection.metric) if self.selection.metric in keys else 0
        self.selection.metric = keys[(at + step) % len(keys)]
        self.redraw()

    def action_regroup(self) -> None:
        with self._store.lock:
            coords = _coords(self._store)
        axes = axes_of(coords)
        if axes:
            current = self._group(coords)
            self.group = axes[(axes.index(current) + 1) % len(axes)] if current in axes else axes[0]
        self.redraw()

    def action_cursor(self, dx: int, dy: int) -> None:
        if self._plan:
            self.selection.rank = step_from(self._plan.grid, self.selection.rank, dx, dy)
            self.redraw()

    def on_click(self, event: events.Click) -> None:
        at = event.get_content_offset(self)
        if at and self._plan and (slot := self._plan.at(at.x, at.y, 1 if self._plan.columns else 0)):
            self.selection.rank = slot[0]
            self.redraw()

    # ---------------------------------------------------------------------------------------- drawing

    def title(self, store: Store) -> str:
        group = store.once(("group", self.group), (Topic.GRID,), lambda: self._group(_coords(store)))
        by = f" · by {group}" if group else ""
        metric = self._metric(store)
        unit = f", {metric.unit}" if metric.unit else ""
        return f"Ranks · {metric.title}{unit}{by}"

    def subtitle(self, store: Store) -> str:
        return "" if store.link is LinkState.ENDED else f"{store.coverage().strip()} reporting"

    def natural_height(self, store: Store) -> int:
        return len(self._planned(store, max(1, self.content_size.width), ROOMY).rows) + 6

    def _planned(self, store: Store, width: int, height: int) -> Plan:
        group = store.once(("group", self.group), (Topic.GRID,), lambda: self._group(_coords(store)))

        def compute() -> Plan:
            found, columns = bands(_coords(store), group)
            return plan(found, columns, width, height, WIDE_CELL)

        return store.once(("plan", group, width, height), (Topic.GRID,), compute)

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        metric = self._metric(store)
        readings = read(store, metric)
        levels = levels_of(store, metric, readings)
        # Hide the inspector if the ranks would otherwise share cells or lose their numbers.
        plans = [(foot, self._planned(store, width, height - foot)) for foot in (1 + INSPECTOR, 2)]
        foot, self._plan = min(plans, key=lambda choice: (choice[1].shared, not choice[1].wide))
        chosen = matching(store, self.selection.filter)
        digits = len(str(store.world - 1))
        drawing = Cells(metric, readings, levels, colours, self.selection.rank, digits, chosen)
        lines = drawing.rows(self._plan)
        gap = max(0, min(1, height - foot - len(lines)))
        lines += [StripLine()] * gap
        lines.append(legend(metric, levels, store.world, self._plan, colours))
        lines += inspector(store, metric, readings, self.selection.rank, colours)[: foot - 1]
        return lines


def _coords(store: Store) -> dict[int, Coords]:
    return {rank: hello.coords for rank, hello in store.state.hellos.items()}
