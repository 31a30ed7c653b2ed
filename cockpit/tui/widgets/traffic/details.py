"""Describes the all-to-all matrix in text: which ranks send and receive most, the pair under the cursor, the pairs with
the most bytes, and one line for each sampled step whose matrix is still in memory."""

import heapq

from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.history.traffic import Matrix, hotter
from cockpit.data.store import Store
from cockpit.data.traffic.traffic import (
    UNBALANCED,
    Balance,
    Most,
    byte_unit,
    hosts_of,
    sample_balance,
    sampled_rows,
)
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.widgets.traffic.view import NodeView, View


def bytes_text(size: float) -> str:
    """A size with three significant digits, such as ``1.24 MB``."""
    unit, scale = byte_unit(10 * size)
    digits = 2 if size < 10 * scale else 1 if size < 100 * scale else 0
    return f"{size / scale:.{digits if scale > 1 else 0}f} {unit}"


def share_text(part: float, whole: float) -> str:
    if not whole:
        return format.MISSING
    share = 100 * part / whole
    return "<0.1 %" if 0 < share < 0.05 else f"{share:.1f} %"


def verdict(store: Store, matrix: Matrix, found: Balance, colours: Palette, width: int) -> list[StripLine]:
    """Two lines: the pair of ranks with the most bytes, and the ranks that send and receive the most."""
    level = Level.WARN if found.unbalanced else Level.GOOD
    pair = found.hottest
    first = StripLine().add(f"{level.value} ", colours.level[level])
    first.add(f"hottest r{pair.source} → r{pair.destination} ", colours.strong)
    first.add(f"{bytes_text(pair.bytes)} · {found.hottest_over_mean:.1f}× the mean pair", colours.text)
    crossing = _crosses(store, pair.source, pair.destination)
    first.add(crossing if first.width + len(crossing) <= width else "", colours.text)
    second = StripLine().add("  busiest: sends ", colours.dim)
    _add_most(second, found.sender, colours)
    second.add(" · receives ", colours.dim)
    _add_most(second, found.receiver, colours)
    second.add(" × mean", colours.dim)
    if found.between_nodes is not None and len(hosts_of(store)) > 1:
        between = f" · {100 * found.between_nodes:.0f} % between nodes"
        if second.width + len(between) <= width:
            second.add(between, colours.dim)
    rows, world = sampled_rows(store, matrix), store.world
    total = f" · {bytes_text(found.total)} in " + ("all" if rows == world else f"{rows} rows")
    if second.width + len(total) <= width:
        second.add(total, colours.dim)
    return [first, second]


def _add_most(line: StripLine, most: Most, colours: Palette) -> None:
    high = most.over_mean >= UNBALANCED
    line.add(f"r{most.rank} {most.over_mean:.2f}", colours.level[Level.WARN] if high else colours.text)
    line.add(f" {Level.WARN.value}" if high else "", colours.level[Level.WARN])


def _crosses(store: Store, source: int, destination: int) -> str:
    """A phrase that says whether a pair crosses nodes, without the nodes' names; "" if all ranks are on one node or the
    host of a rank is unknown."""
    crossing = crossing_text(store, source, destination)
    if not crossing or len(hosts_of(store)) < 2:
        return ""
    return " · crosses nodes" if crossing.startswith("crosses") else " · inside a node"


def crossing_text(store: Store, source: int, destination: int) -> str:
    """A phrase that says whether the two ranks of a pair are on different nodes; "" if a host is unknown."""
    hellos = store.state.hellos
    if source not in hellos or destination not in hellos:
        return ""
    a, b = hellos[source].host, hellos[destination].host
    return f"inside {format.clean(a)}" if a == b else f"crosses {format.clean(a)} → {format.clean(b)}"


def details(
    store: Store,
    matrix: Matrix,
    view: View,
    here: tuple[int, int],
    places: tuple[int, int],
    folded: bool,
    colours: Palette,
    width: int,
) -> list[StripLine]:
    """Three lines about the pair under the cursor: its bytes, and the locations of both ranks. `folded`: whether
    several pairs share the cell; the pair is then the hottest of them."""
    source, destination = here
    if isinstance(view, NodeView):
        return _between_nodes(matrix, view, places, colours)
    size = matrix.bytes_between(source, destination)
    line = StripLine().add(f"r{source} → r{destination}", colours.cursor).add(" ", colours.dim)
    if size is None:
        why = (
            f"r{source} was not sampled" if source not in matrix.sent else "this sample keeps only hot pairs"
        )
        line.add(f" {format.MISSING} {why}", colours.dim)
    else:
        line.add(f" {bytes_text(size)}", colours.strong)
        line.add(f" · {share_text(size, matrix.total)} of all", colours.text)
        back = matrix.bytes_between(destination, source)
        line.add_fitting(
            width,
            [(_crosses(store, source, destination), colours.text)],
            [(" · hottest of its cell" if folded else "", colours.dim)],
            [(f" · {share_text(size, matrix.sent[source])} of what r{source} sends", colours.dim)],
            [(f" · back {bytes_text(back)}" if back is not None else "", colours.dim)],
        )
    sent, received = matrix.sent.get(source), matrix.received.get(destination, 0)
    start = _end(store, "from", source, "sends", sent, colours)
    end = _end(store, "to  ", destination, "receives", received, colours)
    return [line, start, end]


def _end(store: Store, word: str, rank: int, verb: str, size: int | None, colours: Palette) -> StripLine:
    hello = store.state.hellos.get(rank)
    line = StripLine().add(f"{word} ", colours.dim)
    if hello is None:
        return line.add(f"r{rank}: {format.MISSING} has not joined", colours.dim)
    line.add(format.coords(hello.coords) or f"r{rank}", colours.text)
    line.add(f" · {format.clean(hello.host)}", colours.dim)
    return line.add(f" · {verb} {format.MISSING if size is None else bytes_text(size)}", colours.dim)


def _between_nodes(
    matrix: Matrix, view: NodeView, places: tuple[int, int], colours: Palette
) -> list[StripLine]:
    hosts = list(view.hosts)
    source, destination = (hosts[place] for place in places)
    size = matrix.nodes.get((source, destination), 0)
    names = [format.clean(host) for host in (source, destination)]
    line = StripLine().add(f"n{places[0]} → n{places[1]}", colours.cursor).add(" ", colours.dim)
    if view.sent(places[0]) is None:
        line.add(f" {format.MISSING} no rank of {names[0]} was sampled", colours.dim)
    else:
        line.add(f" {bytes_text(size)}", colours.strong)
        line.add(f" · {share_text(size, matrix.total)} of all", colours.text)
        line.add(" · inside the node" if source == destination else " · crosses nodes", colours.dim)
    lines = [line]
    for word, verb, place, sums in (
        ("from", "sends", places[0], view.sent(places[0])),
        ("to  ", "receives", places[1], view.received(places[1])),
    ):
        ranks = view.hosts[hosts[place]]
        sampled = sum(rank in matrix.sent or rank in view.idle for rank in ranks)
        end = StripLine().add(f"{word} ", colours.dim).add(format.clean(hosts[place]), colours.text)
        end.add(f" · r{ranks[0]} to r{ranks[-1]}, {len(ranks)} ranks, {sampled} sampled", colours.dim)
        end.add(f" · {verb} {format.MISSING if sums is None else bytes_text(sums)}", colours.dim)
        lines.append(end)
    return lines


def hottest_pairs(
    store: Store, matrix: Matrix, colours: Palette, most: int, chosen: frozenset[int] | None = None
) -> list[StripLine]:
    """The (sender, receiver) pairs with the most bytes. Without a filter, at most one pair is listed for each square
    block of the matrix (`Matrix.tile`). With a filter, `chosen` holds the ranks that match it, and only pairs of two
    such ranks are listed."""
    if chosen is not None:
        among = matrix.between(chosen, chosen, coarse=False)
        pairs, each = heapq.nlargest(most - 1, among, key=hotter), " among the ranks of the filter"
    else:
        pairs = heapq.nlargest(most - 1, matrix.tiles.values(), key=hotter)
        each = f", at most one for each {matrix.tile}×{matrix.tile} ranks" if matrix.tile > 1 else ""
    lines = [StripLine().add(f"hottest pairs{each}", colours.dim)]
    mean = matrix.total / max(1, matrix.pairs)
    names = [f"r{pair.source} → r{pair.destination}" for pair in pairs]
    width = max(map(len, names), default=0)
    for name, pair in zip(names, pairs, strict=True):
        line = (
            StripLine()
            .add(name.ljust(width), colours.text)
            .add(f"{bytes_text(pair.bytes):>10}", colours.text)
        )
        line.add(f"{pair.bytes / mean:6.2f}× the mean", colours.dim)
        crossing = crossing_text(store, pair.source, pair.destination)
        lines.append(line.add(f"  {crossing}" if crossing else "", colours.dim))
    return lines


def kept_samples(store: Store, matrix: Matrix, colours: Palette, most: int) -> list[StripLine]:
    """One line for each kept sample of the all-to-all, newest first: its bytes, and the ranks that send and receive
    most. So lasting skew differs visibly from a single skewed step. `~` marks a sample with missing rows."""
    head = f"{'kept':11}{'in all':>9}  {'sends most':14}{'receives most':14}hottest pair"
    lines = [StripLine().add(head, colours.dim)]
    for _, one in sorted(store.traffic.matrices.items(), reverse=True)[: most - 1]:
        found = sample_balance(store, one)
        style = colours.text if one is matrix else colours.dim
        line = StripLine().add(f"step {format.grouped(one.step)}".ljust(11), style)
        if found is None:
            lines.append(line.add(f"{format.MISSING} nothing was sent", colours.faint))
            continue
        part = "" if sampled_rows(store, one) == store.world else "~"
        line.add(f"{part + bytes_text(found.total):>9}  ", style)
        for who in (found.sender, found.receiver):
            mark = Level.WARN if who.over_mean >= UNBALANCED else None
            text = f"r{who.rank} {who.over_mean:.2f}×{f' {mark.value}' if mark else ''}"
            line.add(text.ljust(14), colours.level[mark] if mark else style)
        pair = found.hottest
        lines.append(line.add(f"r{pair.source} → r{pair.destination} {bytes_text(pair.bytes)}", style))
    return lines
