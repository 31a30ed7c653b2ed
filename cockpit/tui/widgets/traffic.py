"""Panel with traffic by axis: bytes, time in collectives, and the exposed share of that time."""

from collections.abc import Mapping

from agents.protocol import Traffic
from cockpit.data import format
from cockpit.data.store import Store, Topic
from cockpit.tui.strips import StripLine
from cockpit.tui.theme import Palette
from cockpit.tui.widgets.panel import Panel

ORDER = ("tp", "ep", "cp", "pp", "dp", "control")
UNITS = (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6))
NUMBERS = 47  # `tp        2.1 MB    38.0 ms    38.0 ms    5.7 %  `


class TrafficByAxis(Panel):
    """The panel with one row per axis."""

    TOPICS = frozenset({Topic.CURVES})
    TITLE = "Traffic"
    OPENS = "traffic"
    NATURAL = True
    HELP = (
        "One row for each axis with traffic. Bytes: all bytes that ranks send to other ranks in one "
        "step. Milliseconds: the mean over ranks. `of step`: the exposed time as a share of the step. The bar shows "
        "the time: solid is exposed, grey is overlapped with compute."
    )

    def title(self, store: Store) -> str:
        return "Traffic · per step, by axis"

    def subtitle(self, store: Store) -> str:
        return f"step {format.grouped(store.summary.step)}" if store.summary else ""

    def natural_height(self, store: Store) -> int:
        return len(_axes(store.summary.comm)) + 1 if store.summary else 2

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        summary = store.summary
        if not summary or not summary.comm:
            what = "this run reports no traffic" if summary else "no step is done yet"
            return [StripLine().add(f"{format.MISSING} {what}", colours.faint)]
        axes = _axes(summary.comm)
        if not axes:
            return [StripLine().add("no traffic: the run has one rank", colours.dim)]
        room = max(0, width - NUMBERS)
        unit, scale = _unit(max(summary.comm[axis].bytes for axis in axes))
        longest = max(summary.comm[axis].ms for axis in axes)
        lines = [StripLine().add(f"{'':7}{'sent':>9}{'time':>10}{'exposed':>10}{'of step':>9}", colours.dim)]
        for axis in axes:
            traffic = summary.comm[axis]
            line = StripLine().add(axis[:7].ljust(7), colours.text)
            line.add(f"{format.fixed(traffic.bytes / scale, 6)} {unit}", colours.text)
            line.add(f"{format.fixed(traffic.ms, 7)} ms", colours.text)
            exposed = colours.text if traffic.exposed_ms else colours.dim
            line.add(f"{format.fixed(traffic.exposed_ms, 7)} ms", exposed)
            share = traffic.exposed_ms / summary.step_ms if summary.step_ms > 0 else None
            line.add(f"{format.percent(share, 7)}  ", exposed)
            solid, light = _bar(traffic, longest, room)
            line.add("▇" * solid, colours.accent).add("▇" * light, colours.faint)
            lines.append(line)
        return lines


def _unit(most: float) -> tuple[str, float]:
    """The unit of the column and its size in bytes: the largest unit of which the axis with most bytes sends ten."""
    return next(((unit, size) for unit, size in UNITS if most >= 10 * size), UNITS[-1])


def _axes(comm: Mapping[str, Traffic]) -> list[str]:
    """Axes with traffic, in a fixed order."""
    used = {axis for axis, traffic in comm.items() if traffic.bytes}
    return [axis for axis in ORDER if axis in used] + sorted(used - set(ORDER))


def _bar(traffic: Traffic, longest_ms: float, room: int) -> tuple[int, int]:
    """Numbers of cells for exposed and overlapped time; the axis with the longest time fills `room` cells."""
    if longest_ms <= 0:
        return 0, 0
    whole = min(room, round(traffic.ms / longest_ms * room))
    solid = min(whole, round(traffic.exposed_ms / longest_ms * room))
    return solid, whole - solid
