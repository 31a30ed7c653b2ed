"""Panel with expert load: a row per layer and a column per expert; the height is the load divided by the fair share."""

from dataclasses import dataclass

from rich.style import Style

from agents.alerts.training import DROPPED
from agents.protocol import LayerLoad
from cockpit.data import format
from cockpit.data.diagnosis import IMBALANCE, Level
from cockpit.data.metrics import drop_share
from cockpit.data.store import Store, Topic
from cockpit.tui.strips import StripLine, column
from cockpit.tui.theme import Palette
from cockpit.tui.widgets.panel import Panel

SIDE = 25  # `  1.62×  0.31×   0.0 % !`
# load divided by the fair share at which a bar has full height; a load of the fair share has half of it
FULL = 2.0
DEAD = 0.05  # an expert whose load divided by the fair share is at most this counts as dead
DEAD_GLYPH = "╳"


class ExpertLoad(Panel):
    """The panel of the tokens per expert, summed over the whole job."""

    TOPICS = frozenset({Topic.EXPERTS})
    TITLE = "Experts"
    OPENS = "experts"
    NATURAL = True
    HELP = (
        "Height and colour show an expert's load over its fair share. Half height is the fair share, full height is "
        "twice the fair share or more; orange is above it, blue below. `╳` is a dead expert (at most 5 % of its fair "
        "share). `most` and `least` are the loads of the hottest and the coldest expert, `drop` is the share of routed "
        "tokens over capacity. If not all experts fit, a cell stands for several, as the first line states: its upper "
        "half shows the hottest, its lower half the coldest."
    )

    def title(self, store: Store) -> str:
        return "Experts · load over fair share"

    def subtitle(self, store: Store) -> str:
        experts = store.state.experts
        return f"step {format.grouped(experts.step)}" if experts else ""

    def natural_height(self, store: Store) -> int:
        experts = store.state.experts
        if not experts:
            return 2
        layers = len(experts.layers)
        return layers * (3 if layers <= 4 else 2 if layers <= 8 else 1) + 1

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        experts = store.state.experts
        if not experts or not experts.layers:
            what = "no expert layer has reported yet" if store.fact("experts") else "no experts in this model"
            return [StripLine().add(f"{format.MISSING} {what}", colours.faint)]
        rows = _rows(experts.layers, max(1, height - 1))
        name = max(len(label) for label, _ in rows) + 1
        count = max(len(layer.load) for layer in experts.layers)
        room = max(1, width - name - SIDE)
        across = -(-count // room)
        cells = -(-count // across)
        down = max(len(layers) for _, layers in rows)
        drawing = _Drawing(name, across, max(1, min(8, room // cells)), (height - 1) // len(rows), colours)
        wide = name + cells * drawing.cell
        lines = [_head(count, down, across, name, wide, colours)]
        for label, layers in rows:
            lines += drawing.row(label, layers)
        return lines


def load_bin(ratio: float) -> int:
    """The colour bin of a load. The bins are four times as wide as those for times, because loads vary more."""
    return Palette.bin((ratio - 1) / 4) if ratio > DEAD else 0


def ratios(layer: LayerLoad) -> list[float]:
    """The load of each expert divided by the fair share (the mean load of its layer)."""
    total = sum(layer.load)
    return [load * len(layer.load) / total if total else 0.0 for load in layer.load]


def _rows(layers: list[LayerLoad], most: int) -> list[tuple[str, list[LayerLoad]]]:
    """One row per layer, or per group of consecutive layers if not all fit."""
    per_row = -(-len(layers) // most)
    chunks = [layers[i : i + per_row] for i in range(0, len(layers), per_row)]
    return [
        (f"L{chunk[0].layer}" + (f"-{chunk[-1].layer}" if len(chunk) > 1 else ""), chunk) for chunk in chunks
    ]


def _head(count: int, down: int, across: int, name: int, wide: int, colours: Palette) -> StripLine:
    """The heading: what a cell shows, in the longest wording that fits, and the names of the columns."""
    shared = _folded(down, across)
    text = f"{count} experts"
    if shared:
        texts = (
            f"{text} · a cell is {shared}: hottest over coldest",
            f"a cell is {shared}, hot over cold",
            f"a cell is {shared}",
        )
        text = next((text for text in texts if len(text) <= wide - name), f"a cell is {down}×{across}")
    line = StripLine().pad_to(name, colours.dim).add(text, colours.dim).pad_to(wide, colours.dim)
    return line.add("   most  least    drop", colours.dim)


def _folded(layers: int, experts: int) -> str:
    """The layers and experts that share a cell: ``2 layers × 4 experts``; empty if no cell is shared."""
    words = [f"{layers} layers"] * (layers > 1) + [f"{experts} experts"] * (experts > 1)
    return " × ".join(words)


@dataclass(frozen=True)
class _Drawing:
    """The sizes of a row: name width, experts per cell, columns per cell, and lines per row."""

    name: int
    across: int
    cell: int
    tall: int
    colours: Palette

    def row(self, label: str, layers: list[LayerLoad]) -> list[StripLine]:
        by_expert = list(zip(*map(ratios, layers), strict=False))
        groups = [by_expert[i : i + self.across] for i in range(0, len(by_expert), self.across)]
        held = [[ratio for expert in group for ratio in expert] for group in groups]
        folded = self.across > 1 or len(layers) > 1
        tall = 1 if folded else max(1, min(5, self.tall))
        gap = 1 if self.cell > 2 else 0
        lines = [StripLine() for _ in range(tall)]
        for i, line in enumerate(lines):
            line.add(label.ljust(self.name) if i == tall - 1 else " " * self.name, self.colours.text)
        for cell in held:
            glyphs = [self._folded(cell)] if folded else self._column(cell[0], tall)
            for line, (glyph, style) in zip(lines, glyphs, strict=True):
                line.add(glyph * (self.cell - gap), style).add(" " * gap, self.colours.text)
        self._numbers(lines[-1], layers, [ratio for cell in held for ratio in cell])
        return lines

    def _column(self, ratio: float, tall: int) -> list[tuple[str, Style]]:
        """One expert as a vertical bar."""
        style = self.colours.deviation[load_bin(ratio)]
        if ratio <= DEAD:
            return [(" ", style)] * (tall - 1) + [(DEAD_GLYPH, style)]
        return [(glyph, style) for glyph in column(ratio / FULL, tall)]

    def _folded(self, cell: list[float]) -> tuple[str, Style]:
        """A cell for several experts: its upper half shows the highest load and its lower half the lowest. If an expert
        is dead, the cell shows `DEAD_GLYPH` instead."""
        hot, cold = (self.colours.deviation[load_bin(ratio)] for ratio in (max(cell), min(cell)))
        if min(cell) <= DEAD:
            return DEAD_GLYPH, hot
        return "▀", Style(color=hot.color, bgcolor=cold.color)

    def _numbers(self, line: StripLine, layers: list[LayerLoad], loads: list[float]) -> None:
        most, least = max(loads, default=0.0), min(loads, default=0.0)
        drop = max(drop_share(layer.load, layer.dropped) for layer in layers)
        text, warn = self.colours.text, self.colours.level[Level.WARN]
        line.add(f"  {format.fixed(most, 5, 2)}×", warn if most >= IMBALANCE else text)
        line.add(f"  {format.fixed(least, 4, 2)}×", warn if least <= DEAD else text)
        line.add(f"  {format.percent(drop, 4)}", warn if drop >= DROPPED else text)
        wrong = most >= IMBALANCE or least <= DEAD or drop >= DROPPED
        line.add(f" {Level.WARN.value if wrong else ' '}", warn)
