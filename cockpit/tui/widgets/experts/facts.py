"""Lines about one expert: whether it is dead, hot or neither and since when, its load, the ranks that hold it, and its
layer."""

from collections.abc import Sequence

from rich.style import Style

from agents.alerts.training import COLLAPSE, DROPPED
from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.experts import UNKNOWN, Cell, Shown, capacity, owners, since_text, unwells
from cockpit.data.history.experts import Health
from cockpit.data.store import Store
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.widgets.experts.figures import layer_loads
from cockpit.tui.widgets.experts.heat import DEAD_GLYPH, HOT_GLYPH

LEVELS = {Health.DEAD: Level.BAD, Health.HOT: Level.WARN}
GLYPHS = {Health.DEAD: DEAD_GLYPH, Health.HOT: HOT_GLYPH}
FIRST = {Health.DEAD: "longest", Health.HOT: "hottest"}  # the word for the first of several experts
RANKS_NAMED = 4


def name(cell: Cell) -> str:
    """The name of an expert on the screen, such as ``L2 e5``."""
    return f"L{cell[0]} e{cell[1]}"


def verdict(store: Store, at: Shown, width: int, colours: Palette) -> StripLine:
    """One line with the numbers of dead and of hot experts, and the worst of them; if it fits in `width` cells, also
    with the steps at which they became dead or hot."""
    whole = _verdict(store, at, True, colours)
    return whole if whole.width <= width else _verdict(store, at, False, colours)


def _verdict(store: Store, at: Shown, with_since: bool, colours: Palette) -> StripLine:
    found = unwells(store, at)
    line = StripLine()
    for health, those in found.items():
        style = colours.level[LEVELS[health]]
        line.add("   " if line.width else "", style)
        layers = f" in {those.layers} layers" if those.layers > 1 else ""
        first = f", {FIRST[health]}" if those.count > 1 else ":"
        worst = those.worst
        line.add(f"{GLYPHS[health]} {format.grouped(those.count)} {health.value}{layers}{first} ", style)
        load = f" {worst.load:.1f}×" if health is Health.HOT else ""
        since = f" {since_text(worst.streak).split(',')[0]}" if worst.streak and with_since else ""
        line.add(f"{name(worst.cell)}{load}{since}", colours.text)
    if not found:
        most = max((max(at.row(layer)[1]) for layer in at.layers), default=0.0)
        line.add(f"{Level.GOOD.value} ", colours.level[Level.GOOD])
        line.add(f"no dead and no hot expert; the hottest carries {most:.2f}× its fair share", colours.dim)
    return line


def expert_facts(store: Store, at: Shown, cell: Cell | None, colours: Palette) -> list[StripLine]:
    """Four lines about an expert: its state, its load, the ranks that hold it, and its layer."""
    load = at.load(cell) if cell else None
    if cell is None or load is None:
        hint = "w: the worst expert · arrow keys choose an expert"
        if cell is not None:
            hint = f"{name(cell)}: no load at {at.step_text()} · {hint}"
        return [StripLine().add(hint, colours.faint)]
    return [
        _state(at, cell, colours),
        _load(at, cell, load, colours),
        _owner(store, cell, colours),
        _layer(store, at, cell[0], colours),
    ]


def _state(at: Shown, cell: Cell, colours: Palette) -> StripLine:
    line = StripLine().add(f" {name(cell)} ", colours.cursor).add(" ", colours.text)
    streak = at.streak(cell)
    if streak is None:
        return line.add(f"expert {cell[1]} of layer {cell[0]} is neither dead nor hot", colours.dim)
    style = colours.level[LEVELS[streak.health]]
    line.add(f"{GLYPHS[streak.health]} {streak.health.value} ", style)
    return line.add(since_text(streak), style)


def _load(at: Shown, cell: Cell, load: tuple[float, float], colours: Palette) -> StripLine:
    place, count = at.rank(cell)
    low, high = load
    text = f"{high:.2f}×" if low == high else f"{low:.2f}-{high:.2f}×"
    line = StripLine().add(f"load {text}", colours.strong).add(" of the fair share", colours.text)
    line.add(f" · {format.percent(high / count).strip()} of its layer", colours.text)
    return line.add(f" · number {place} of {count} by load", colours.text)


def _owner(store: Store, cell: Cell, colours: Palette) -> StripLine:
    held = owners(store, cell)
    if not held.ranks:
        return StripLine().add(f"{format.MISSING} {held.why}", colours.faint)
    line = StripLine().add("held by ", colours.dim)
    lost = [rank for rank in held.ranks if rank in store.state.gone and not store.state.gone[rank].clean]
    for rank in held.ranks[:RANKS_NAMED]:
        line.add(f"{Level.BAD.value} r{rank} " if rank in lost else f"r{rank} ", _style(rank, lost, colours))
    if len(held.ranks) > RANKS_NAMED:
        line.add(f"and {len(held.ranks) - RANKS_NAMED} more ", colours.dim)
    line.add(f"({_common(store, held.ranks)})", colours.text)
    hosts = list(dict.fromkeys(store.state.hellos[rank].host for rank in held.ranks))
    more = f" and {len(hosts) - 2} more" if len(hosts) > 2 else ""
    return line.add(f" on {', '.join(hosts[:2])}{more}", colours.dim)


def _style(rank: int, lost: Sequence[int], colours: Palette) -> Style:
    return colours.level[Level.BAD] if rank in lost else colours.strong


def _common(store: Store, ranks: Sequence[int]) -> str:
    """The coordinates that all `ranks` share, as text."""
    hellos = store.state.hellos
    first = hellos[ranks[0]].coords
    return format.coords(
        {axis: at for axis, at in first.items() if all(hellos[rank].coords.get(axis) == at for rank in ranks)}
    )


def _layer(store: Store, at: Shown, layer: int, colours: Palette) -> StripLine:
    row = layer_loads(at, [layer])
    line = StripLine().add(f"layer {layer} ", colours.dim)
    drops, even = row.most.drops, row.least.entropy
    warn = colours.level[Level.WARN]
    line.add(f"drops {format.percent(drops, 4).strip()}", warn if drops >= DROPPED else colours.text)
    line.add(f" · even {format.fixed(even, 4, 2)}", warn if even < COLLAPSE else colours.text)
    line.add(f" · CV {format.fixed(row.most.cv, 4, 2)}", colours.text)
    line.add(f" · {row.dead} dead", colours.level[Level.BAD] if row.dead else colours.dim)
    line.add(f" · {row.hot} hot", warn if row.hot else colours.dim)
    limit = capacity(store, at.frame.last)
    if isinstance(limit, float | int):
        over = sum(load > limit for load in row.high)
        line.add(f" · {over} of {len(row.high)} over the capacity", warn if over else colours.dim)
    return line


def capacity_text(store: Store, at: Shown) -> str:
    """The load above which tokens are dropped, as text."""
    limit = capacity(store, at.frame.last)
    if limit == UNKNOWN:
        return ""
    return "no capacity: nothing drops" if limit is None else f"capacity {limit:.3g}× of the fair share"
