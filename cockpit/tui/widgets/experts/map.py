"""The map of the experts screen, in one of three views: layers x experts, one load statistic of each layer over steps,
or one layer as bars."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.binding import Binding

from cockpit.data.experts import Cell, Shown, capacity, hottest, shown, unwell, unwells
from cockpit.data.history.experts import Health
from cockpit.data.store import Store, Topic
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.keys.screen_bindings import EXPERTS, EXPERTS_KEYS
from cockpit.tui.session import Selection
from cockpit.tui.widgets.experts.bars import bars
from cockpit.tui.widgets.experts.facts import capacity_text, expert_facts, verdict
from cockpit.tui.widgets.experts.figures import HOTTEST, METRICS, LayerMetric, add_figures, layer_loads
from cockpit.tui.widgets.experts.heat import Fold, Heat, fold
from cockpit.tui.widgets.experts.load import head
from cockpit.tui.widgets.experts.missing import guide, no_experts, why_empty
from cockpit.tui.widgets.experts.steps import StepMap
from cockpit.tui.widgets.panel import Panel

INSPECTOR = 3
LOAD = "load"


@dataclass(frozen=True)
class _Base:
    """The parts of the map that do not depend on the cursor: its heading, and the lines of each row."""

    heat: Heat
    head: StripLine
    rows: list[list[StripLine]]


class ExpertMap(Panel):
    """The load of every expert of every layer, with a cursor at the expert that is selected on all screens."""

    TOPICS = frozenset({Topic.EXPERTS, Topic.CURVES, Topic.BOARD})
    TITLE = "Experts"
    OPENS = "experts"
    NATURAL = True
    BINDINGS: ClassVar[list[Binding]] = EXPERTS_KEYS  # type: ignore[assignment]
    ACTIONS = EXPERTS
    HELP = (
        "Each row is a layer, each column an expert; height and colour show the load relative to the fair share. Half "
        "height is the fair share, full height is twice the fair share or more; orange is above it, blue below. `╳` is "
        "a dead expert (under 1 % of the fair share); a hot one has 2.5 times the fair share or more. If not all fit, "
        "a cell holds several experts or layers, as the first line states; it shows the hottest and below it the "
        "coldest, `▲` if one is hot or `◆` if one is hot and one dead, and the cursor is on the worst. `w` goes to the "
        "worst expert, and again to the next: the longest dead first, then the hottest. `m` shows a figure of each "
        "layer over steps: the hottest expert, dropped pairs, evenness (1 is even, 0 is a single expert), spread, or "
        "experts without a token. `o` sorts each layer by load. Enter or `z` shows one layer as bars, with the "
        "capacity above which an expert drops tokens. Loads include dropped pairs. The loads of all experts are "
        "sampled every few steps, so since when an expert has been dead or hot is known only from the samples that "
        "this cockpit received. `held by` names the ranks that compute the expert, as they report it."
    )

    def __init__(self, selection: Selection) -> None:
        super().__init__("experts")
        self.selection = selection
        self.metric: LayerMetric | None = None  # None: the load of each expert
        self.sorted = False
        self.one_layer = False
        self.alone = False  # whether the panel with details is hidden
        self._heat: Heat | None = None
        self._steps: StepMap | None = None
        # the worst experts when `w` was first pressed, the current one first
        self._walk: deque[Cell] = deque()
        self._walk_has_dead = False

    # -------------------------------------------------------------------------------------------- choices

    def choice(self) -> object:
        one = self.selection
        return self.metric, self.sorted, self.one_layer, self.alone, one.layer, one.expert, one.step

    @property
    def cell(self) -> Cell | None:
        """The expert under the cursor."""
        layer, expert = self.selection.layer, self.selection.expert
        return None if layer is None or expert is None else (layer, expert)

    def _select(self, cell: Cell) -> None:
        self.selection.layer, self.selection.expert = cell
        self.redraw()

    def _shown(self) -> Shown | None:
        return shown(self._store, self.selection.step)

    def action_metric(self, by: int = 1) -> None:
        choices: list[LayerMetric | None] = [None, *METRICS]
        self.metric = choices[(choices.index(self.metric) + by) % len(choices)]
        self.one_layer = False
        self.redraw()

    def action_order(self) -> None:
        self.sorted = not self.sorted
        self.redraw()

    def action_worst(self) -> None:
        """Select the worst expert. If the worst expert is already selected, select the next worst."""
        with self._store.lock:
            at = self._shown()
            if at is None:
                return
            cells = [one.cell for one in unwell(self._store, at)] or hottest(at)
            dead = Health.DEAD in unwells(self._store, at)
        if not cells:
            return
        if not self._walk or self.cell != self._walk[0] or dead != self._walk_has_dead:
            self._walk, self._walk_has_dead = deque(cells), dead
            if self.cell == cells[0]:
                self._walk.rotate(-1)
        else:
            self._walk.rotate(-1)
        self._select(self._walk[0])

    def action_cursor(self, dx: int, dy: int) -> None:
        with self._store.lock:
            at = self._shown()
            if at is None or not at.layers:
                return
            if self.metric and dx and self._steps:
                self.selection.step = self._steps.step_beside(self.selection.step, dx)
                moved = self.cell
            elif self.one_layer or self.metric:
                moved = self._in_layer(at, dx, dy)
            else:
                moved = self._in_map(dx, dy)
        if moved:
            self._select(moved)
        else:
            self.redraw()

    def _in_layer(self, at: Shown, dx: int, dy: int) -> Cell | None:
        """The expert `dx` positions to the right of the cursor, in the layer that is `dy` layers below it."""
        layers = at.layers
        layer, expert = self.cell or (layers[0], 0)
        order = self._order(at, layer)
        place = order.index(expert) if expert in order else 0
        number = layers.index(layer) if layer in layers else 0
        layer = layers[max(0, min(len(layers) - 1, number + dy))]
        order = self._order(at, layer)
        return layer, order[max(0, min(len(order) - 1, place + dx))]

    def _in_map(self, dx: int, dy: int) -> Cell | None:
        """The worst expert in the cell that is `dx` columns to the right of the cursor and `dy` rows below it."""
        heat = self._heat
        if heat is None:
            return None
        if self.cell is None or (y := heat.fold.row_of(self.cell[0])) is None:
            return heat.worst_of(0, 0)
        x = heat.cell_of(self.cell) or 0
        x = max(0, min(heat.fold.cells - 1, x + dx))
        y = max(0, min(len(heat.fold.rows) - 1, y + dy))
        return heat.worst_of(y, x)

    def _order(self, at: Shown, layer: int) -> list[int]:
        """The experts of a layer from left to right."""
        _, high = at.row(layer)
        numbers = range(len(high))
        return sorted(numbers, key=lambda one: -high[one]) if self.sorted else list(numbers)

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        heat = self._heat
        if offset and heat and not self.metric and not self.one_layer:
            y = (offset.y - 2) // heat.fold.tall
            x = (offset.x - heat.fold.name) // heat.fold.cell
            if 0 <= y < len(heat.fold.rows) and 0 <= x < heat.fold.cells and (cell := heat.worst_of(y, x)):
                self._select(cell)

    # -------------------------------------------------------------------------------------------- drawing

    def title(self, store: Store) -> str:
        what = "load over fair share"
        if self.metric:
            what = f"{self.metric.title} by layer over steps"
        elif self.one_layer and self.selection.layer is not None:
            what = f"load of layer {self.selection.layer} over fair share"
        order = " · sorted by load" if self.sorted and not self.metric else ""
        at = shown(store, self.selection.step)
        return f"Experts · {what}{order}" + (f" · {at.step_text()}" if at and not self.metric else "")

    def subtitle(self, store: Store) -> str:
        at = shown(store, self.selection.step)
        return capacity_text(store, at) if at else ""

    def natural_height(self, store: Store) -> int:
        at = shown(store, self.selection.step)
        layers = len(at.layers) if at else 0
        tall = 5 if layers <= 4 else 3 if layers <= 8 else 2 if layers <= 12 else 1
        return max(layers * tall, 12 if self.one_layer else 0) + 2 if layers else 2

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        at = shown(store, self.selection.step)
        if at is None or not at.layers:
            if no_experts(store):
                return guide(store, width, height, colours)
            return why_empty(store, colours, self.selection.step)
        foot = expert_facts(store, at, self.cell, colours)[:INSPECTOR] if self.alone else []
        foot = foot[: max(0, height - 5)]
        room = height - len(foot)
        lines = [verdict(store, at, width, colours)]
        if self.metric:
            lines += self._over_steps(store, at, self.metric, width, room - 1, colours)
        elif self.one_layer and self.selection.layer in at.layers:
            lines += self._layer(store, at, self.selection.layer, width, room - 1, colours)
        else:
            lines += self._map(store, at, width, room - 1, colours)
        lines = lines[:room]
        return lines + [StripLine()] * (room - len(lines) if foot else 0) + foot

    def _map(self, store: Store, at: Shown, width: int, height: int, colours: Palette) -> list[StripLine]:
        version = (at.number, at.frame, width, height, self.sorted, id(colours))
        base = store.once("expert map", (), lambda: self._base(at, width, height, colours), version)
        self._heat = heat = base.heat
        lines = [base.head]
        cursor = self.cell
        y = heat.fold.row_of(cursor[0]) if cursor else None
        for number, drawn in enumerate(base.rows):
            here = heat.cell_of(cursor) if cursor and number == y else None
            lines += drawn if here is None else self._row(heat, number, here)
        return lines

    def _base(self, at: Shown, width: int, height: int, colours: Palette) -> "_Base":
        """The heading and the rows of the map, drawn without the cursor."""
        layers = at.layers
        count = max(len(at.row(layer)[0]) for layer in layers)
        sizes = fold(layers, count, width, height - 1, whole=True)
        order = {layer: self._order(at, layer) for layer in layers} if self.sorted else {}
        heat = Heat(at, sizes, colours, order)
        line = head(count, sizes, colours, ", hottest first" if self.sorted else "")
        if sizes.trend:
            line.add("  hottest over the last samples"[: sizes.trend + 2], colours.dim)
        return _Base(heat, line, [self._row(heat, y, None) for y in range(len(sizes.rows))])

    def _row(self, heat: Heat, y: int, cursor: int | None) -> list[StripLine]:
        at, sizes, colours = heat.at, heat.fold, heat.colours
        layers = sizes.rows[y]
        drawn = heat.row(y, cursor)
        add_figures(drawn[-1], layer_loads(at, layers), sizes.columns, colours)
        if sizes.trend:
            self._trend(drawn[-1], at, layers, sizes, colours)
        return drawn

    def _trend(
        self, line: StripLine, at: Shown, layers: Sequence[int], sizes: Fold, colours: Palette
    ) -> None:
        steps = StepMap.recent(at, sizes.trend)
        line.add("  ", colours.text)
        for glyph, style in steps.row(at, layers, HOTTEST, colours):
            line.add(glyph, style)

    def _layer(
        self, store: Store, at: Shown, layer: int, width: int, height: int, colours: Palette
    ) -> list[StripLine]:
        limit = capacity(store, at.frame.last)
        cap = limit if isinstance(limit, float | int) else None
        order = self._order(at, layer)
        cursor = self.selection.expert
        return bars(at, layer, order, cap, cursor, width, height, colours)

    def _over_steps(
        self, store: Store, at: Shown, metric: LayerMetric, width: int, height: int, colours: Palette
    ) -> list[StripLine]:
        self._steps = steps = StepMap.whole(at, width, height - 1)
        return steps.draw(at, metric, self.selection, colours)
