"""The overview panel with the load of each expert in the shown step, as a map of layers and experts."""

from cockpit.data import format
from cockpit.data.experts import Shown, shown
from cockpit.data.store import Store, Topic
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.session import Selection
from cockpit.tui.widgets.experts.figures import add_figures, heading, layer_loads
from cockpit.tui.widgets.experts.heat import Fold, Heat, fold
from cockpit.tui.widgets.experts.missing import why_empty
from cockpit.tui.widgets.panel import Panel


class ExpertLoad(Panel):
    """The panel with the load of each expert relative to the mean load of its layer's experts (the fair share)."""

    TOPICS = frozenset({Topic.EXPERTS})
    TITLE = "Experts"
    OPENS = "experts"
    NATURAL = True
    HELP = (
        "Height and colour show an expert's load relative to its fair share. Half height is the fair share, full "
        "height is twice the fair share or more; orange is above it, blue below. `╳` is a dead expert (under 1 % of "
        "its fair share); a hot one has 2.5 times its fair share or more. `most` and `least` are the loads of the "
        "hottest and the coldest expert; `drop` is the share of routed tokens over capacity. If not all experts fit, a "
        "cell holds several, as the first line states: its upper half shows the hottest, its lower half the coldest; "
        "`▲` stands for a cell with a hot one. Enter opens the experts screen."
    )

    def __init__(self, selection: Selection, id: str = "experts") -> None:
        super().__init__(id)
        self._selection = selection

    def choice(self) -> object:
        return self._selection.step

    def title(self, store: Store) -> str:
        return "Experts · load over fair share"

    def subtitle(self, store: Store) -> str:
        at = shown(store, self._selection.step)
        return at.step_text() if at else ""

    def natural_height(self, store: Store) -> int:
        at = shown(store, self._selection.step)
        layers = len(at.layers) if at else 0
        return layers * (3 if layers <= 4 else 2 if layers <= 8 else 1) + 1 if layers else 2

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        step = self._selection.step
        at = shown(store, step)
        if at is None:
            return why_empty(store, colours, step)
        version = (at.number, at.frame, width, height, id(colours))
        return store.once("expert load", (), lambda: self._map(at, width, height, colours), version)

    def _map(self, at: Shown, width: int, height: int, colours: Palette) -> list[StripLine]:
        layers = at.layers
        count = max(len(at.row(layer)[0]) for layer in layers)
        sizes = fold(layers, count, width, max(1, height - 1))
        heat = Heat(at, sizes, colours)
        lines = [head(count, sizes, colours)]
        for y, of_row in enumerate(sizes.rows):
            drawn = heat.row(y, None)
            add_figures(drawn[-1], layer_loads(at, of_row), sizes.columns, colours)
            lines += drawn
        return lines


def head(count: int, fold: Fold, colours: Palette, order: str = "") -> StripLine:
    """The heading: the meaning of a cell, in the longest wording that fits, and the names of the columns."""
    shared = fold.held()
    experts = format.counted(count, "expert")
    texts = [f"{experts}{order}"]
    if shared:
        texts = [
            f"{experts}{order} · a cell is {shared}: hottest over coldest",
            f"a cell is {shared}{order}, hot over cold",
            f"a cell is {shared}, hot over cold",
            f"a cell is {shared}",
        ]
    room = fold.wide - fold.name
    text = next((text for text in texts if len(text) <= room), f"a cell is {fold.down}×{fold.across}")
    line = StripLine().pad_to(fold.name, colours.dim).add(text, colours.dim).pad_to(fold.wide, colours.dim)
    return line.add(heading(fold.columns), colours.dim)
