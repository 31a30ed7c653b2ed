"""Expert load: a row a layer, a column an expert, as high as its load over the ideal."""

from agents.wire import LayerLoad
from cockpit import format
from cockpit.lines import Line, column
from cockpit.store import Store, Topic
from cockpit.theme import Palette
from cockpit.verdict import IMBALANCE, Level, drop_share
from cockpit.widgets.panel import Panel

SIDE = 18  # `  1.62×   0.0 % !`
FULL = 2.0  # load over ideal at which a column is full; half height is the ideal


class ExpertLoad(Panel):
    """Where the router sends tokens, over the whole job."""

    TOPICS = frozenset({Topic.EXPERTS})
    TITLE = "Experts"
    NATURAL = True
    HELP = (
        "Height and colour are an expert's load over its fair share: half height is the ideal, full is twice it "
        "or more; orange is over, blue under. `max` is the hottest expert, `drop` the share of routed tokens "
        "over capacity. Where layers or experts share a cell, it shows the hottest."
    )

    def title(self, store: Store) -> str:
        return "Experts · load over ideal"

    def subtitle(self, store: Store) -> str:
        experts = store.state.experts
        return f"step {format.grouped(experts.step)}" if experts else ""

    def natural_height(self, store: Store) -> int:
        experts = store.state.experts
        return (
            len(experts.layers) * (3 if len(experts.layers) <= 4 else 2 if len(experts.layers) <= 8 else 1)
            + 1
            if experts
            else 2
        )

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[Line]:
        experts = store.state.experts
        if not experts or not experts.layers:
            what = "no expert layer has reported yet" if store.fact("experts") else "no experts in this model"
            return [Line().add(f"{format.MISSING} {what}", colours.faint)]
        rows = [("L" + str(layer.layer), [layer]) for layer in experts.layers]
        if len(rows) + 1 > height:
            rows = _shared(experts.layers, max(1, height - 1))
        tall = max(1, min(5, (height - 1) // len(rows)))
        name = max(len(label) for label, _ in rows) + 1
        count = max(len(layer.load) for layer in experts.layers)
        room = max(1, width - name - SIDE)
        per_cell = -(-count // room)
        cells = -(-count // per_cell)
        cell = max(1, min(8, room // cells))
        head = (
            Line()
            .pad_to(name, colours.dim)
            .add(f"{count} experts".ljust(cells * cell)[: cells * cell], colours.dim)
        )
        head.add("    max    drop", colours.dim)
        lines = [head]
        for label, layers in rows:
            lines += _layer(label, layers, name, per_cell, cell, tall, colours)
        return lines


def load_bin(ratio: float) -> int:
    """The colour of a load: routing is never even, so the bins of the grid are taken four times as wide."""
    return Palette.bin((ratio - 1) / 4) if ratio > 0.05 else 0


def _shared(layers: list[LayerLoad], rows: int) -> list[tuple[str, list[LayerLoad]]]:
    """Consecutive layers that share a row, so that all of them fit."""
    per_row = -(-len(layers) // rows)
    chunks = [layers[i : i + per_row] for i in range(0, len(layers), per_row)]
    return [
        (f"L{chunk[0].layer}-{chunk[-1].layer}" if len(chunk) > 1 else f"L{chunk[0].layer}", chunk)
        for chunk in chunks
    ]


def ratios(layer: LayerLoad) -> list[float]:
    """Load over the ideal, by expert."""
    total = sum(layer.load)
    return [load * len(layer.load) / total if total else 0.0 for load in layer.load]


def _layer(
    label: str, layers: list[LayerLoad], name: int, per_cell: int, cell: int, tall: int, colours: Palette
) -> list[Line]:
    by_layer = [ratios(layer) for layer in layers]
    # Where layers or experts share a cell it shows the hottest of them.
    hottest = [max(column) for column in zip(*by_layer, strict=False)]
    shown = [max(hottest[i : i + per_cell]) for i in range(0, len(hottest), per_cell)]
    worst = max(hottest, default=0.0)
    drop = max(drop_share(layer.load, layer.dropped) for layer in layers)
    lines = [Line() for _ in range(tall)]
    gap = 1 if cell > 2 else 0
    for i, line in enumerate(lines):
        line.add(label.ljust(name) if i == tall - 1 else " " * name, colours.text)
    for ratio in shown:
        style = colours.apart[load_bin(ratio)]
        for line, glyph in zip(lines, column(ratio / FULL, tall), strict=True):
            line.add(glyph * (cell - gap), style).add(" " * gap, colours.text)
    warn = worst >= IMBALANCE or drop >= 0.01
    style = colours.level[Level.WARN] if worst >= IMBALANCE else colours.text
    lines[-1].add(f"  {format.fixed(worst, 5, 2)}×", style)
    lines[-1].add(f"  {format.percent(drop, 4)}", colours.level[Level.WARN] if drop >= 0.01 else colours.text)
    lines[-1].add(f" {Level.WARN.value if warn else ' '}", colours.level[Level.WARN])
    return lines
