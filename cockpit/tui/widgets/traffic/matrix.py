"""Panel with the all-to-all matrix: bytes from each rank to each rank, or from each node to each node."""

from typing import ClassVar, NamedTuple

from textual import events
from textual.binding import Binding

from cockpit.data import format
from cockpit.data.filter import matching
from cockpit.data.history.traffic import Matrix, hotter
from cockpit.data.store import Store, Topic
from cockpit.data.traffic.traffic import (
    byte_unit,
    expected,
    hosts_of,
    idle_ranks,
    sample_balance,
    sampled_rows,
    why_none,
)
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.keys.screen_bindings import TRAFFIC, TRAFFIC_KEYS
from cockpit.tui.session import Selection
from cockpit.tui.widgets.panel import Panel
from cockpit.tui.widgets.traffic.cells import TOTAL, Drawing, legend
from cockpit.tui.widgets.traffic.details import details, hottest_pairs, kept_samples, verdict
from cockpit.tui.widgets.traffic.view import (
    NUMBER,
    Cells,
    NodeView,
    Places,
    Plan,
    RankView,
    View,
    cells,
    plan,
)

TALL = 12  # from this number of lines on, the panel explains its colours and sums its columns
LABEL = 9  # minimum width of the names of rows, for the labels beside head and sums
LIST = 21  # maximum number of lines for the hottest pairs
ROOM = 48  # minimum panel width for the sums of the rows


class Shown(NamedTuple):
    """What was drawn last: the view, its `Plan`, the width of the row names, and the panel line on which the matrix
    begins."""

    view: View
    plan: Plan
    label: int
    first: int


class Level(NamedTuple):
    """A zoom level of the matrix: whether rows and columns are nodes, and which rows and columns it shows."""

    nodes: bool
    rows: Places
    columns: Places


class TrafficMatrix(Panel):
    """The panel with the newest sampled all-to-all or, if a step is selected, with the last sample up to that step."""

    EVERY = 2  # drawing a matrix of a thousand ranks takes longer than the rest of the screen
    TOPICS = frozenset({Topic.CURVES, Topic.GRID})
    TITLE = "Traffic"
    BINDINGS: ClassVar[list[Binding]] = TRAFFIC_KEYS  # type: ignore[assignment]
    ACTIONS = TRAFFIC
    HELP = (
        "Bytes of the experts' all-to-all in one sampled step: a row is the sender, a column the receiver. Colour "
        "shows the bytes relative to the mean of the pairs with bytes: orange is more, blue less. `sent` and "
        "`received` are sums; from 1.5 times the mean they are orange, because all ranks wait for the busiest. If not "
        "all ranks fit, a cell shows the hottest of its pairs, and the sum of a row or column is that of its busiest "
        "rank. Enter zooms in, Escape zooms out. `╱` means that the row was not sampled, `╲` marks the rank itself, "
        "and blank or 0 is zero. Between nodes, the diagonal is the traffic that stays inside a node. With a filter, "
        "pairs that are not between two of its ranks are dimmed."
    )

    def __init__(self, selection: Selection) -> None:
        super().__init__("matrix")
        self.selection = selection
        self._by_node = False  # whether rows are nodes while no level is entered
        self._levels: list[Level] = []  # the levels entered with Enter, widest first
        self._source = selection.rank
        # Destination of the cursor; None: that of the source's hottest pair.
        self._destination: int | None = None
        self._moved = False  # until the operator chooses a rank, the cursor is on the hottest pair of all
        self._shown: Shown | None = None

    # ---------------------------------------------------------------------------------------- choices

    @property
    def nodes(self) -> bool:
        """Whether the matrix shows nodes instead of ranks."""
        return self._levels[-1].nodes if self._levels else self._by_node

    def choice(self) -> object:
        level = self._levels[-1] if self._levels else None
        matrix = self._matrix(self._store)
        version = matrix.version if matrix else len(self._store.traffic.matrices)
        chosen = self.selection.filter
        filter = chosen.text if chosen else ""
        return self.nodes, level, self._destination, self.selection.rank, self.selection.step, version, filter

    def _cursor(self, matrix: Matrix) -> tuple[int, int] | None:
        """The source rank and the destination rank at the cursor."""
        rank = self.selection.rank
        if rank != self._source:  # another screen selected a rank
            self._source, self._destination, self._moved = rank, None, True
        if rank is not None and self._destination is not None:
            return rank, self._destination
        hottest = matrix.hottest
        if rank is not None and self._moved:
            own = matrix.between((rank,), range(self._store.world), coarse=False)
            hottest = max(own, default=hottest, key=hotter)
        return (hottest.source, hottest.destination) if hottest else None

    def _redraw(self) -> None:
        self.redraw()
        self.refresh_bindings()  # whether Enter can zoom in has changed

    def action_view(self) -> None:
        self._by_node, self._levels = not self.nodes, []
        self._redraw()

    def action_hottest(self) -> None:
        matrix = self._matrix(self._store)
        pair = matrix.hottest if matrix else None
        if pair:
            self._levels = []
            self._move_to(pair.source, pair.destination)

    def _move_to(self, source: int, destination: int) -> None:
        self.selection.rank = self._source = source
        self._destination, self._moved = destination, True
        self._redraw()

    def action_cursor(self, down: int, right: int) -> None:
        with self._store.lock:
            matrix = self._matrix(self._store)
            here = self._cursor(matrix) if matrix else None
            if not self._shown or not here:
                return
            shown, view = self._shown.plan, self._shown.view
            source, destination = self._places(view, here)
            at = shown.at(source, destination) or (0, 0)
            row, column = at[0] + down, at[1] + right
            if not (0 <= row < shown.height and 0 <= column < shown.width):
                self._scroll(shown, view, down, right)
                return
            rows, columns = shown.row(row), shown.column(column)
            source = rows[0] if down or source not in rows else source
            destination = columns[0] if right or destination not in columns else destination
            self._move_to(*self._ranks(view, source, destination))

    def _scroll(self, shown: Plan, view: View, down: int, right: int) -> None:
        """If the matrix is zoomed in, scroll it by one row or column, and move the cursor with it."""
        rows, columns = shown.rows, shown.columns
        if not self._levels or not (isinstance(rows, range) and isinstance(columns, range)):
            return
        rows, columns = (
            range(rows.start + down, rows.stop + down),
            range(columns.start + right, columns.stop + right),
        )
        everyone = len(view.everyone)
        if min(rows.start, columns.start) < 0 or max(rows.stop, columns.stop) > everyone:
            return
        self._levels[-1] = Level(self.nodes, rows, columns)
        matrix = self._matrix(self._store)
        here = self._cursor(matrix) if matrix else None
        if here:
            source, destination = self._places(view, here)
            self._move_to(*self._ranks(view, source + down, destination + right))

    def _places(self, view: View, ranks: tuple[int, int]) -> tuple[int, int]:
        """The row and the column in which the view shows a pair of `ranks` (source, destination). In a view of nodes,
        these are the row of the source's node and the column of the destination's node."""
        if not isinstance(view, NodeView):
            return ranks
        hellos = self._store.state.hellos
        source, destination = (hellos[rank].host if rank in hellos else "" for rank in ranks)
        return view.number.get(source, 0), view.number.get(destination, 0)

    def _ranks(self, view: View, source: int, destination: int) -> tuple[int, int]:
        """The sending and the receiving rank of a pair in the view; in a view of nodes, where `source` and
        `destination` are nodes, the first rank of each node."""
        if not isinstance(view, NodeView):
            return source, destination
        ranks = list(view.hosts.values())
        return ranks[source][0], ranks[destination][0]

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disable a zoom key (Enter or Escape) if this panel cannot zoom any further in that direction, so that the
        screen handles the key instead."""
        if action == "out":
            return bool(self._levels)
        return self._closer() is not None if action == "into" else True

    def action_into(self) -> None:
        level = self._closer()
        if level:
            self._levels.append(level)
            self._redraw()

    def action_out(self) -> None:
        self._levels.pop()
        self._redraw()

    def _closer(self) -> Level | None:
        """What zooming in would show: the ranks or nodes that share the cell under the cursor; in a node view, the
        ranks of two nodes; otherwise as many ranks as fit with a number in each cell."""
        matrix = self._matrix(self._store)
        here = self._cursor(matrix) if matrix else None
        if self._shown is None or matrix is None or here is None:
            return None
        view, shown = self._shown.view, self._shown.plan
        at = shown.at(*self._places(view, here)) or (0, 0)
        if shown.folded:
            rows, columns = shown.row(at[0]), shown.column(at[1])
            closer = max(len(rows), len(columns)) > view.tile  # a condensed matrix does not keep every pair
            return Level(self.nodes, rows, columns) if closer else None
        if isinstance(view, NodeView):
            ranks = list(view.hosts.values())
            source, destination = self._places(view, here)
            return Level(False, _range(ranks[source]), _range(ranks[destination]))
        if not shown.numbers:
            width = (self.content_size.width - self._shown.label - TOTAL) // NUMBER
            rows, columns = shown.rows, shown.columns
            return Level(False, _around(rows, at[0], shown.height), _around(columns, at[1], max(1, width)))
        return None

    def on_click(self, event: events.Click) -> None:
        at = event.get_content_offset(self)
        if not at or not self._shown:
            return
        view, shown, label, first = self._shown
        row, column = at.y - first, (at.x - label) // shown.cell
        if at.x >= label and 0 <= row < shown.height and column < shown.width:
            self._move_to(*self._ranks(view, shown.row(row)[0], shown.column(column)[0]))
            if event.chain == 2:
                self.action_into()

    # ---------------------------------------------------------------------------------------- drawing

    def _matrix(self, store: Store) -> Matrix | None:
        return store.traffic.at(self.selection.step)

    def title(self, store: Store) -> str:
        matrix = self._matrix(store)
        words = ["All-to-all", "node to node" if self.nodes else "rank to rank"]
        if matrix:
            words.append(f"step {format.grouped(matrix.step)}")
            if self.selection.step is not None and self.selection.step != matrix.step:
                words[-1] += f" (sample before step {format.grouped(self.selection.step)})"
        chosen = self._chosen(store)
        if chosen is not None:
            words.append(f"filter {len(chosen)}/{store.world}, rest dim")
        return " · ".join(words)

    def _chosen(self, store: Store) -> frozenset[int] | None:
        """The ranks that match the filter; None without a filter."""
        return matching(store, self.selection.filter, self.selection.step)

    def subtitle(self, store: Store) -> str:
        matrix = self._matrix(store)
        if matrix is None:
            return ""
        words = [f"{sampled_rows(store, matrix)}/{store.world} ranks sampled"]
        behind = (store.step or 0) - matrix.step
        if behind > 0:
            step_ms = store.state.step_ms
            aged = f" ({format.age(behind * step_ms / 1e3)})" if step_ms else ""
            words.append(f"{format.grouped(behind)} step{'s' * (behind > 1)} ago{aged}")
        return " · ".join(words)

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        matrix = self._matrix(store)
        self._shown = None
        found = sample_balance(store, matrix) if matrix else None
        if matrix is None or found is None:
            step = self.selection.step
            why = why_none(store)
            if step is not None and expected(store):
                kept = ", ".join(map(str, store.traffic.matrices)) or "none"
                why = (
                    f"step {format.grouped(step)} is not kept, and no sample before it; kept samples: {kept}"
                )
            return [
                StripLine().add(text, colours.faint)
                for text in format.wrapped(f"{format.MISSING} {why}", max(10, width))
            ]
        view = self._view(store, matrix)
        rows, columns = self._levels[-1][1:] if self._levels else (view.everyone, view.everyone)
        lines = verdict(store, matrix, found, colours, width)[: max(0, min(2, height - 3))]
        foot = 3 if height >= TALL else min(2, max(0, height - 8))
        extra = 2 if height >= TALL else 0  # received, legend
        totals = width >= ROOM
        shown, label = _fitted(
            view, rows, columns, width - (TOTAL if totals else 0), height - len(lines) - 1 - foot - extra
        )
        inside = store.once(
            "traffic cells",
            (),
            lambda: cells(view, shown),
            also=(matrix.version, self.nodes, shown),
        )
        unit = byte_unit(max((pair.bytes for pair in inside.largest.values()), default=1))
        here = self._cursor(matrix)
        cursor = shown.at(*self._places(view, here)) if here else None
        drawing = Drawing(view, shown, inside, colours, label, unit, cursor, same=not self.nodes)
        drawing.totals = totals
        chosen = self._chosen(store)
        if chosen is not None:
            drawing.rows_out = _outside(view, [shown.row(at) for at in range(shown.height)], chosen)
            drawing.columns_out = _outside(view, [shown.column(at) for at in range(shown.width)], chosen)
        lines.append(drawing.head())
        self._shown = Shown(view, shown, label, len(lines))
        lines += [drawing.row(at) for at in range(shown.height)]
        if extra:
            lines.append(drawing.received())
            lines.append(legend(view, colours, shown, sum(inside.missing)))
        lines += self._foot(store, matrix, inside, cursor, here, width, foot, colours)
        spare = height - len(lines)
        if spare >= 5:
            most = max(9, spare - 3 - len(store.traffic.matrices))
            lines += [StripLine(), *hottest_pairs(store, matrix, colours, min(spare - 1, most, LIST), chosen)]
            spare = height - len(lines)
        if spare >= 4:
            lines += [StripLine(), *kept_samples(store, matrix, colours, spare - 1)]
        return lines

    def _view(self, store: Store, matrix: Matrix) -> View:
        idle = idle_ranks(store, matrix)

        def make() -> View:
            if self.nodes:
                return NodeView(matrix, hosts_of(store), idle)
            return RankView(matrix, store.world, idle)

        return store.once("traffic view", (Topic.GRID,), make, also=(matrix.version, self.nodes, idle))

    def _foot(
        self,
        store: Store,
        matrix: Matrix,
        inside: Cells,
        cursor: tuple[int, int] | None,
        here: tuple[int, int] | None,
        width: int,
        height: int,
        colours: Palette,
    ) -> list[StripLine]:
        """Lines about the pair under the cursor or, if several pairs share the cell, about the hottest of them."""
        assert self._shown
        view, shown = self._shown.view, self._shown.plan
        if here is None:
            return []
        pair = inside.largest.get(cursor) if cursor and shown.folded else None
        if pair:
            here = pair.source, pair.destination
            if self.nodes:
                here = self._ranks(view, *here)
        places = self._places(view, here)
        return details(store, matrix, view, here, places, shown.folded, colours, width)[:height]


def _fitted(view: View, rows: Places, columns: Places, width: int, height: int) -> tuple[Plan, int]:
    """The `Plan` of the matrix for `width` x `height` terminal cells, and the width of the row names. Row names are
    longer if several ranks or nodes share a row, and longer names leave fewer cells for the matrix."""
    label = LABEL if width >= ROOM - TOTAL else 1
    for _ in range(2):
        shown = plan(view, rows, columns, width - label, height)
        names = [view.label(shown.row(at)) for at in (0, shown.height - 1)]
        label = max(label, *(len(name) + 2 for name in names))
    return shown, label


def _outside(view: View, lines: list[Places], chosen: frozenset[int]) -> frozenset[int]:
    """The indices of the rows or columns that contain no rank of `chosen`."""
    if isinstance(view, NodeView):
        ranks = list(view.hosts.values())
        return frozenset(
            at for at, line in enumerate(lines) if all(chosen.isdisjoint(ranks[place]) for place in line)
        )
    return frozenset(at for at, line in enumerate(lines) if chosen.isdisjoint(line))


def _range(ranks: list[int]) -> Places:
    whole = range(ranks[0], ranks[-1] + 1)
    return whole if len(whole) == len(ranks) else tuple(ranks)


def _around(places: Places, at: int, count: int) -> Places:
    """At most `count` ranks or nodes around the index `at`."""
    first = max(0, min(at - count // 2, len(places) - count))
    return places[first : first + count]
