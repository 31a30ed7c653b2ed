"""The visible part of the matrix: whether it shows ranks or nodes, which of these are visible, and how many share a
cell. This module draws nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cockpit.data.history.traffic import Matrix, Pair

NUMBER = 6  # minimum width of a cell with a number
WIDEST = 9  # maximum width of a cell

Places = Sequence[int]
"""Ranks, or numbers of nodes, in the order in which they are shown."""


class View(Protocol):
    """A view of the matrix, in which rows and columns are ranks (`RankView`) or nodes (`NodeView`)."""

    everyone: Places

    def pairs(self, rows: Places, columns: Places, square: int) -> Iterable[Pair]:
        """The (sender, receiver) pairs with traffic. If the whole matrix is drawn, and each cell stands for at least
        `square` x `square` pairs, the result may omit pairs, but never the pair with the most bytes in a cell.
        """
        ...

    def usual(self, pair: Pair) -> float:
        """The mean of the bytes over the pairs with traffic. In a node view, pairs within a node and pairs between
        nodes have separate means."""
        ...

    def sent(self, place: int) -> int | None:
        """Bytes that the rank or node sent; None if its row is missing."""
        ...

    def received(self, place: int) -> int: ...

    def label(self, places: Places) -> str:
        """The name of a row or column, such as ``r12`` or ``r0-31``."""
        ...

    @property
    def tile(self) -> int:
        """The side length of a tile, in ranks or nodes. A tile is a square block of the matrix; for each tile, the
        (sender, receiver) pair with the most bytes is kept."""
        ...


class RankView:
    """One row for each rank that sends and one column for each rank that receives. `idle`: ranks that send nothing."""

    def __init__(self, matrix: Matrix, world: int, idle: frozenset[int] = frozenset()) -> None:
        self.matrix, self.idle = matrix, idle
        self.everyone: Places = range(world)
        self._mean = matrix.total / max(1, matrix.pairs)

    def pairs(self, rows: Places, columns: Places, square: int) -> Iterable[Pair]:
        whole = len(rows) == len(columns) == len(self.everyone)
        coarse = whole and square >= self.matrix.tile
        return self.matrix.between(_container(rows), _container(columns), coarse)

    def usual(self, pair: Pair) -> float:
        return self._mean

    def sent(self, place: int) -> int | None:
        return self.matrix.sent.get(place, 0 if place in self.idle else None)

    def received(self, place: int) -> int:
        return self.matrix.received.get(place, 0)

    def label(self, places: Places) -> str:
        return _label("r", places)

    @property
    def tile(self) -> int:
        return self.matrix.tile if self.matrix.condensed else 1


class NodeView:
    """One row and one column for each node. A cell is the sum over all rank pairs between two nodes; the diagonal is
    the traffic within each node."""

    tile = 1

    def __init__(
        self, matrix: Matrix, hosts: dict[str, list[int]], idle: frozenset[int] = frozenset()
    ) -> None:
        self.matrix, self.hosts, self.idle = matrix, hosts, idle
        self.number = {host: at for at, host in enumerate(hosts)}
        self.everyone: Places = range(len(hosts))
        self._pairs: list[Pair] = []
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}
        self._ranks = list(hosts.values())
        for (a, b), size in matrix.nodes.items():
            if a in self.number and b in self.number:
                source, destination = self.number[a], self.number[b]
                self._pairs.append(Pair(size, source, destination))
                self._sent[source] = self._sent.get(source, 0) + size
                self._received[destination] = self._received.get(destination, 0) + size
        self._inside = _mean([pair.bytes for pair in self._pairs if pair.source == pair.destination])
        self._between = _mean([pair.bytes for pair in self._pairs if pair.source != pair.destination])

    def pairs(self, rows: Places, columns: Places, square: int) -> Iterable[Pair]:
        inside, across = _container(rows), _container(columns)
        return (pair for pair in self._pairs if pair.source in inside and pair.destination in across)

    def usual(self, pair: Pair) -> float:
        return self._inside if pair.source == pair.destination else self._between

    def sent(self, place: int) -> int | None:
        if all(rank not in self.matrix.sent and rank not in self.idle for rank in self._ranks[place]):
            return None
        return self._sent.get(place, 0)

    def received(self, place: int) -> int:
        return self._received.get(place, 0)

    def label(self, places: Places) -> str:
        return _label("n", places)


def _label(letter: str, places: Places) -> str:
    return f"{letter}{places[0]}" if len(places) == 1 else f"{letter}{places[0]}-{places[-1]}"


def _container(places: Places) -> range | frozenset[int]:
    return places if isinstance(places, range) else frozenset(places)


@dataclass(frozen=True)
class Plan:
    """The layout of the visible part of the matrix. `rows`, `columns`: the visible ranks or nodes. `down`, `across`:
    how many adjacent ranks or nodes are merged into one row (`down`) and into one column (`across`). `cell`: the width
    of a cell."""

    rows: Places
    columns: Places
    down: int
    across: int
    cell: int

    @property
    def numbers(self) -> bool:
        return self.cell >= NUMBER

    @property
    def folded(self) -> bool:
        return self.down > 1 or self.across > 1

    def row(self, at: int) -> Places:
        """The ranks or nodes that share the row `at`."""
        return self.rows[at * self.down : (at + 1) * self.down]

    def column(self, at: int) -> Places:
        return self.columns[at * self.across : (at + 1) * self.across]

    @property
    def height(self) -> int:
        return -(-len(self.rows) // self.down)

    @property
    def width(self) -> int:
        """Number of columns."""
        return -(-len(self.columns) // self.across)

    def at(self, source: int, destination: int) -> tuple[int, int] | None:
        """The row and the column in which a pair is shown; None if the pair is not visible."""
        try:
            return self.rows.index(source) // self.down, self.columns.index(destination) // self.across
        except ValueError:
            return None


def plan(view: View, rows: Places, columns: Places, width: int, height: int) -> Plan:
    """The layout of `rows` x `columns` in `width` x `height` terminal cells. If not all ranks or nodes fit, several
    share a row or a column."""
    down = _fold(len(rows), max(1, height), view.tile)
    across = _fold(len(columns), max(1, width), view.tile)
    cells = -(-len(columns) // across)
    return Plan(rows, columns, down, across, max(1, min(WIDEST, width // max(1, cells))))


def _fold(count: int, room: int, least: int) -> int:
    """How many ranks or nodes must share a row (or column) so that all `count` of them fit into `room` rows (or
    columns). Candidates are `least` and its multiples by powers of two; the result is the smallest candidate that
    suffices."""
    fold = least
    while -(-count // fold) > room:
        fold *= 2
    return fold


@dataclass(frozen=True)
class Cells:
    """For each cell, the pair with the most bytes; for each row and column, the sum of bytes. Cells are addressed by
    the row and the column in which the `Plan` draws them, not by rank or node. If several ranks or nodes share a row or
    a column, only the largest of their sums is kept."""

    largest: dict[tuple[int, int], Pair]
    sent: list[int | None]
    received: list[int]
    missing: list[int]  # by row, the number of places that were not sampled


def cells(view: View, shown: Plan) -> Cells:
    """The contents of the cells of the layout `shown`."""
    rows = {place: at // shown.down for at, place in enumerate(shown.rows)}
    columns = {place: at // shown.across for at, place in enumerate(shown.columns)}
    largest: dict[tuple[int, int], Pair] = {}
    for pair in view.pairs(shown.rows, shown.columns, min(shown.down, shown.across)):
        key = rows[pair.source], columns[pair.destination]
        if key not in largest or pair.bytes > largest[key].bytes:
            largest[key] = pair
    each = [[view.sent(place) for place in shown.row(at)] for at in range(shown.height)]
    return Cells(
        largest,
        [max((size for size in sizes if size is not None), default=None) for sizes in each],
        [max(map(view.received, shown.column(at)), default=0) for at in range(shown.width)],
        [sum(size is None for size in sizes) for sizes in each],
    )


def _mean(sizes: Sequence[int]) -> float:
    return sum(sizes) / len(sizes) if sizes else 0.0
