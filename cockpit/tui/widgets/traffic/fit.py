"""Panel with a linear model of each axis's time in collectives, fitted to the run's steps: the time that each
micro-batch adds regardless of its bytes (α) and the bandwidth (1/β), beside the planner's assumptions for the link."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.style import Style

from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.store import Store, Topic
from cockpit.data.traffic.traffic import AxisTraffic, axes_with_traffic, by_axis, byte_unit, summary_at
from cockpit.data.traffic.traffic_fit import Fit, Known, NoFit, fits, varied_text
from cockpit.data.traffic.traffic_roof import Roof, roof
from cockpit.knobs.plan.axes import AxesPlan, PlannedAxes
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.widgets.panel import Panel

NAME = 8  # width of the name of an axis


class Part(NamedTuple):
    """A piece of text that is never split over two lines."""

    text: str
    style: Style


class TrafficFit(Panel):
    """The panel with one paragraph per axis. It shows two values fitted to the run's steps, the time that each
    micro-batch adds regardless of its bytes (α) and the bandwidth (1/β), and the link's bandwidth and latency from the
    planner's hardware table."""

    TOPICS = frozenset({Topic.CURVES})
    TITLE = "Fit"
    EVERY = 3
    HELP = (
        "The time in collectives is fitted to the run's own steps as rest + α × micro-batches + β × bytes; each value "
        "has its 90 % interval. α is known only if the number of micro-batches varied, and 1/β (a rank's bandwidth) "
        "only if the bytes varied. The rest is the time that neither explains, mainly waiting for other ranks. The "
        "last line is the roofline: the slowest link that the axis crosses, the rate that large collectives reach on "
        "it, and the time for the bytes of a step at that rate. If the run's layout is known, the planner's exposed "
        "time and number of collectives follow."
    )

    def __init__(self, plan: AxesPlan) -> None:
        super().__init__("fit")
        self.plan = plan

    def choice(self) -> object:
        return self.plan.worker.version

    def title(self, store: Store) -> str:
        return "Fit · rest + α × micro-batches + β × bytes"

    def subtitle(self, store: Store) -> str:
        return f"over {format.counted(len(store.state.summaries), 'step')}"

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        summary = summary_at(store, None)
        rows = by_axis(summary, store.world) if summary else []
        if not rows:
            return [StripLine().add(f"{format.MISSING} no traffic to fit yet", colours.faint)]
        found = fits(store, axes_with_traffic(summary.comm) if summary else [])
        planned = self.plan.ask(store)
        lines: list[StripLine] = []
        for warning, style in _warnings(store, colours):
            lines += flow([Part(word, style) for word in warning.split()], width, 0, " ")
        paragraphs = []
        for row in rows:
            if row.axis == "control":
                continue
            result, top = found[row.axis], roof(store, row)
            lead = [Part(row.axis[: NAME - 1].ljust(NAME), colours.text)]
            text = flow(list(_measured(result, colours)), width, NAME, " · ", lead)
            foot = [*(_linked(result, row, top, colours) if top else ()), *_planned(row, planned, colours)]
            text += flow(foot, width, NAME, " · ") if foot else []
            paragraphs.append((isinstance(result, Fit), text))
        room = height - len(lines)
        if sum(len(text) for _, text in paragraphs) > room:
            paragraphs.sort(key=lambda one: not one[0])  # if not all axes fit, those with a fit come first
        for count, (_, text) in enumerate(paragraphs):
            last = count == len(paragraphs) - 1
            if len(lines) + len(text) > height - (not last):
                left = len(paragraphs) - count
                lines = [*lines, *text][: max(0, height - 1)]
                axes = "one more axis" if left == 1 else f"{left} more axes"
                lines.append(StripLine().add(f"{'':{NAME}}{axes}: z", colours.dim))
                break
            lines += text
        return lines


def _warnings(store: Store, colours: Palette) -> Iterator[tuple[str, Style]]:
    warn = colours.level[Level.WARN]
    if store.oversubscribed:
        cores = store.number("cores")
        of = f"{cores} cores" if cores else "cores"
        text = f"{Level.WARN.value} {store.world} ranks share {of}: times are not those of a cluster"
        yield text, warn
    if store.simulated:
        yield f"{Level.NOTE.value} simulated: times are predicted", colours.dim


def _measured(found: Fit | NoFit, colours: Palette) -> Iterator[Part]:
    if isinstance(found, NoFit):
        first, *rest = found.why.split(": ", 1)
        yield Part(f"{format.MISSING} {first}", colours.dim)
        yield from (Part(why, colours.dim) for one in rest for why in one.split(", "))
        return
    if found.ms_per_byte is None:
        yield Part(f"{varied_text(found.spread)}: no β", colours.dim)
    elif not found.ms_per_byte.clear:
        yield Part("no clear dependence on bytes", colours.dim)
    else:
        value, reach = found.ms_per_byte
        ends = f"{_size(1e3 / (value + reach))} to {_size(1e3 / (value - reach))}"
        yield Part(f"1/β {_size(1e3 / value)}/s ({ends})", colours.strong)
    if found.start_ms:
        yield Part(
            f"α {_ms(found.start_ms)} a micro-batch", colours.strong if found.start_ms.clear else colours.dim
        )
    yield Part(f"rest {_ms(found.rest_ms)}", colours.text)
    many = "outliers" if found.left_out > 1 else "outlier"
    outliers = f", {found.left_out} {many} left out" if found.left_out else ""
    yield Part(f"{format.counted(found.samples, 'step')}{outliers}", colours.dim)


def _ms(known: Known) -> str:
    return f"{known.value:.3g} ±{known.reach:.2g} ms"


def _size(size: float) -> str:
    """A number of bytes as text, with three significant digits."""
    unit, scale = byte_unit(10 * size)
    return f"{size / scale:.3g} {unit}"


def _linked(found: Fit | NoFit, row: AxisTraffic, top: Roof, colours: Palette) -> Iterator[Part]:
    link = f"{format.clean(top.link)} {_size(top.bytes_per_s)}/s, {1e6 * top.latency_s:.3g} µs"
    yield Part(f"{link} ({'assumed' if top.assumed else format.clean(top.machine)})", colours.dim)
    size = top.bytes_ms
    there = f"{size / 1e3:.1f} s" if size >= 1e4 else f"{size:.0f} ms" if size >= 10 else f"{size:.2g} ms"
    yield Part(f"{there} for its bytes, {row.traffic.ms:.1f} ms taken", colours.dim)
    if isinstance(found, Fit):
        slope = found.ms_per_byte
        if slope and slope.clear:
            share = 100 * 1e3 / slope.value / top.bytes_per_s
            yield Part(f"the fit is {share:.2g} % of the link", colours.text)


def _planned(row: AxisTraffic, planned: PlannedAxes | str | None, colours: Palette) -> Iterator[Part]:
    """The axis's exposed time as predicted by the planner (for the slowest rank) and as measured, and the predicted
    number of collectives in a step."""
    if not isinstance(planned, PlannedAxes):
        return
    exposed, count = planned.exposed_ms.get(row.axis), planned.collectives.get(row.axis)
    if exposed is not None:
        yield Part(f"planned {exposed:.1f} ms, measured {row.traffic.exposed_ms:.1f}", colours.text)
    if count:
        yield Part(f"{format.grouped(count)} collectives a step", colours.dim)


def flow(
    parts: Sequence[Part], width: int, indent: int, separator: str, lead: Sequence[Part] = ()
) -> list[StripLine]:
    """`parts` joined by `separator`, wrapped at `width` cells and indented by `indent` cells. The first line begins
    with the parts of `lead`."""
    line = StripLine()
    for text, style in lead:
        line.add(text, style)
    lines = [line]
    for at, (text, style) in enumerate(parts):
        if at and line.width + len(separator) + len(text) > width:
            line = StripLine()
            lines.append(line)
            line.pad_to(indent, style).add(text, style)
        else:
            line.add(separator if at else "", style).pad_to(0 if at else indent, style).add(text, style)
    return lines
