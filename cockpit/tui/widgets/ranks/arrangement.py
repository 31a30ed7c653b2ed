"""Layout of the rank grid: one band per coordinate on the grouping axis or per node, with the largest cells that fit.

If even the smallest cells do not fit, several ranks share a cell, and the cell shows the worst of these ranks. This
module draws nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

Coords = Mapping[str, int]
Slot = tuple[int, ...]  # the ranks of one cell; () is an empty cell

LABEL_GAP = 2
NODE = "node"  # grouping by `Hello.host`; no axis has this name


@dataclass(frozen=True)
class Band:
    """The ranks of one group, arranged in rows: ranks with the same coordinate on the grouping axis, or on one node."""

    label: str
    rows: list[tuple[str, list[Slot]]]

    @property
    def ranks(self) -> list[int]:
        return [rank for _, slots in self.rows for slot in slots for rank in slot]


@dataclass(frozen=True)
class Row:
    """One line of the grid. If `bottom` is set, the upper halves of the cells show `top` and the lower halves show
    `bottom`; otherwise whole cells show `top`."""

    label: str
    sub: str
    top: list[Slot]
    bottom: list[Slot] | None = None


@dataclass(frozen=True)
class Plan:
    """The layout of the rank grid. If `wide`, each cell has a bar and a number; otherwise it has only a colour."""

    wide: bool
    cell: int  # width in terminal cells
    label: int  # width of the labels on the left
    columns: list[str]
    rows: list[Row]
    shared: int = 1  # ranks per cell
    nodes: int = 0  # nodes per cell, if a cell is one node or several

    @property
    def grid(self) -> list[list[Slot]]:
        """The lines of the grid from top to bottom, each as the list of the cells among which the cursor moves."""
        lines: list[list[Slot]] = []
        for row in self.rows:
            if row.top:
                lines.append(row.top)
            if row.bottom:
                lines.append(row.bottom)
        return lines

    def at(self, x: int, y: int, first_row: int) -> Slot:
        """The ranks of the grid cell that is drawn at this position of the panel; if the position shows two grid cells,
        one in each half of a line, the ranks of the upper one."""
        row, column = y - first_row, (x - self.label) // self.cell
        if x < self.label or not 0 <= row < len(self.rows) or column >= len(self.rows[row].top):
            return ()
        return self.rows[row].top[column]


def axes_of(coords: Mapping[int, Coords]) -> list[str]:
    """The axes on which the ranks differ, outermost first."""
    names = list(next(iter(coords.values()), {}))
    return [axis for axis in names if len({at.get(axis) for at in coords.values()}) > 1]


def own_axes(coords: Mapping[int, Coords]) -> list[str]:
    """The axes that identify a rank. Derived axes are left out, such as ep, which reuses the ranks of other axes."""
    columns = {axis: [at.get(axis) for at in coords.values()] for axis in axes_of(coords)}
    for axis in reversed([*columns]):
        rest = {other: column for other, column in columns.items() if other != axis}
        if rest and len(set(zip(*rest.values(), strict=True))) == len(coords):
            columns = rest
    return [*columns]


def bands(coords: Mapping[int, Coords], group: str | None) -> tuple[list[Band], list[str]]:
    """The ranks in bands (one for each coordinate on the axis `group`), with rows and columns by their other
    coordinates, and the labels of the columns."""
    own = own_axes(coords)
    derived = group is not None and group not in own
    rest = [axis for axis in own if axis != group]
    # Ranks with one coordinate on a derived axis are not adjacent: pack them, one row per outermost coordinate.
    across = None if derived or not rest else rest[-1]
    down = rest[:1] if derived else rest[:-1]
    values = sorted({at.get(across, 0) for at in coords.values()}) if across else []
    found = []
    for value in sorted({at.get(group, 0) for at in coords.values()}) if group else [0]:
        rows: dict[tuple[int, ...], list[int]] = {}
        for rank in sorted(coords):
            if group is None or coords[rank].get(group, 0) == value:
                rows.setdefault(tuple(coords[rank].get(axis, 0) for axis in down), []).append(rank)
        lines: list[tuple[str, list[Slot]]] = []
        for key in sorted(rows):
            label = " ".join(f"{axis}{at}" for axis, at in zip(down, key, strict=True))
            if across:
                at_column = {coords[rank].get(across, 0): rank for rank in rows[key]}
                lines.append((label, [(at_column[v],) if v in at_column else () for v in values]))
            else:
                lines.append((label, [(rank,) for rank in rows[key]]))
        found.append(Band(f"{group}{value}" if group else "", lines))
    return found, [f"{across} {value}" for value in values]


def by_node(hosts: Mapping[int, str]) -> list[Band]:
    """One band per host, ordered by the first rank on each host. `hosts`: the host of each rank."""
    nodes: dict[str, list[Slot]] = {}
    for rank in sorted(hosts):
        nodes.setdefault(hosts[rank], []).append((rank,))
    return [Band(host, [("", slots)]) for host, slots in nodes.items()]


def plan(
    found: Sequence[Band], columns: list[str], width: int, height: int, wide_cell: int, nodes: bool = False
) -> Plan:
    """The layout with the largest cells that fit in `width` x `height`. `nodes`: each band holds the ranks of one node.
    If there are more nodes than lines, several nodes share a line, and a cell may stand for one or more whole nodes."""
    band_label = max((len(band.label) for band in found), default=0)
    sub_label = max((len(label) for band in found for label, _ in band.rows), default=0)
    label = band_label + (sub_label + 1 if sub_label else 0) + LABEL_GAP
    across = max((len(slots) for band in found for _, slots in band.rows), default=0)
    rows_wanted = sum(len(band.rows) for band in found)
    head = 1 if columns else 0
    if rows_wanted + head <= height and label + across * wide_cell <= width:
        spaced = rows_wanted + head + len(found) - 1 <= height
        rows: list[Row] = []
        for band in found:
            if rows and spaced:
                rows.append(Row("", "", []))
            rows += [Row(band.label if not i else "", sub, slots) for i, (sub, slots) in enumerate(band.rows)]
        spare = (width - label) // max(across, 1)
        return Plan(True, min(spare, wide_cell + 24), label, columns, rows)
    if nodes and len(found) > height:
        return _packed(found, width, height)
    first_of: dict[int, str] = {}  # the group of each rank, if a line holds several groups
    if len(found) > height:
        first_of = {rank: band.label for band in found for rank in band.ranks}
        found = [Band("", [row for band in found for row in band.rows])]
    label = band_label + LABEL_GAP
    inner = max(1, across)
    members = [(band.label, band.ranks) for band in found]
    ranks = sum(len(own) for _, own in members)
    shared = 1
    while shared * 2 * max(1, width - label) * max(1, height) < ranks:  # too few cells, even halved ones
        shared *= 2
    while True:
        groups = [(name, _shared(own, shared)) for name, own in members]
        for cell, half in ((3, False), (2, False), (1, False), (1, True)):
            rows = _tiles(groups, (width - label) // cell, inner if shared == 1 else 1, half)
            if len(rows) <= height or shared >= ranks:
                spaced = len(rows) + len(found) - 1 <= height
                if first_of:  # each line is named after the group in which it begins
                    rows = [replace(row, label=first_of[row.top[0][0]]) for row in rows]
                return Plan(
                    False, cell, label, [], _spaced(rows) if spaced and not first_of else rows, shared
                )
        shared *= 2


def _packed(found: Sequence[Band], width: int, height: int) -> Plan:
    """The layout with several nodes on each line, separated by gaps. If this layout is too large, each cell stands for
    one or more whole nodes.
    """
    label = max(len(band.label) for band in found) + LABEL_GAP
    label = label if label * 3 <= width else 0
    slots = [band.rows[0][1] for band in found]
    most = max(map(len, slots))
    for cell in (3, 2, 1):
        in_line = (width - label) // ((most + 1) * cell)
        if in_line and -(-len(found) // in_line) <= height:
            rows = []
            for i in range(0, len(found), in_line):
                padded = [[*node, *[()] * (most + 1 - len(node))] for node in slots[i : i + in_line]]
                line: list[Slot] = [slot for node in padded for slot in node][:-1]
                rows.append(Row(found[i].label if label else "", "", line))
            return Plan(False, cell, label, [], rows)
    in_cell = 1
    while True:
        nodes = [found[i : i + in_cell] for i in range(0, len(found), in_cell)]
        groups = [("", [tuple(rank for band in part for rank in band.ranks) for part in nodes])]
        for cell, half in ((3, False), (2, False), (1, False), (1, True)):
            rows = _tiles(groups, (width - label) // cell, 1, half)
            if len(rows) <= height or in_cell >= len(found):
                if label:
                    host = {band.ranks[0]: band.label for band in found}
                    rows = [replace(row, label=host[row.top[0][0]]) for row in rows]
                return Plan(False, cell, label, [], rows, most * in_cell, in_cell)
        in_cell *= 2


def _shared(ranks: list[int], count: int) -> list[Slot]:
    return [tuple(ranks[i : i + count]) for i in range(0, len(ranks), count)]


def _tiles(groups: Sequence[tuple[str, list[Slot]]], room: int, inner: int, half: bool) -> list[Row]:
    """The cells of each group in lines of at most `room` cells, as rows of the grid. Where possible, a line ends after
    a multiple of `inner` cells."""
    rows: list[Row] = []
    for label, slots in groups:
        per_line = _even(len(slots), max(1, room), inner, 2 if half else 1)
        lines = [slots[i : i + per_line] for i in range(0, len(slots), per_line)]
        if half:
            pairs = [(lines[i], lines[i + 1] if i + 1 < len(lines) else []) for i in range(0, len(lines), 2)]
            rows += [Row(label if not i else "", "", top, low) for i, (top, low) in enumerate(pairs)]
        else:
            rows += [Row(label if not i else "", "", line) for i, line in enumerate(lines)]
    return rows


def _even(count: int, room: int, inner: int, together: int) -> int:
    """How many cells to put in a line, so that lines have about equal lengths and, where possible, no group of `inner`
    cells is broken across lines."""
    lines = max(1, -(-count // room))
    lines += -lines % together
    per_line = -(-count // lines)
    rounded = per_line + -per_line % inner
    return rounded if rounded <= room else per_line


def _spaced(rows: list[Row]) -> list[Row]:
    spaced: list[Row] = []
    for row in rows:
        if spaced and row.label:
            spaced.append(Row("", "", []))
        spaced.append(row)
    return spaced


def step_from(grid: Sequence[Sequence[Slot]], rank: int | None, dx: int, dy: int) -> int | None:
    """The rank to which the cursor moves from `rank`; the same rank if the cursor is already at the edge of the grid.
    If `rank` is None, the cursor moves to the first rank."""
    places = [(y, x) for y, row in enumerate(grid) for x, slot in enumerate(row) if slot]
    if not places:
        return None
    here = next(((y, x) for y, x in places if rank in grid[y][x]), None)
    if here is None:
        return grid[places[0][0]][places[0][1]][0]
    y, x = here
    if dy:
        ahead = sorted({row for row, _ in places if (row - y) * dy > 0}, key=lambda row: abs(row - y))
        if ahead:
            y = ahead[0]
            x = min((column for row, column in places if row == y), key=lambda column: abs(column - x))
    else:
        ahead = sorted(
            {col for row, col in places if row == y and (col - x) * dx > 0}, key=lambda col: abs(col - x)
        )
        x = ahead[0] if ahead else x
    return grid[y][x][0]
