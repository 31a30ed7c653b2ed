"""The text of the traffic screen for a run that sends nothing, or does not report what it sends."""

from cockpit.data.store import Store
from cockpit.data.traffic.traffic import axes_with_traffic
from cockpit.tui.drawing.guide import Guide, guide_lines
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import Palette

_ABOUT = (
    "This screen shows the bytes that each axis of the grid sends, how long its collectives take, how much of that "
    "time is hidden behind computation, and which rank sends to which."
)
_UNREPORTED = Guide(
    _ABOUT,
    (
        ("this run", "2 Ranks and 3 Pipeline show how long each phase takes on each rank"),
        ("your own loop", "agents.join and cockpit wrap measure phases, not collectives"),
        ("engine run", "measures each collective; nothing has to be set"),
    ),
)
_ONE_RANK = Guide(
    _ABOUT,
    (
        ("this run", "1 Overview, 6 Curves and 7 Plan show it"),
        ("more ranks", "a layout with a larger grid, such as engine run LAYOUT grid.dp_shard=2"),
    ),
)


def no_traffic(store: Store) -> bool:
    """Whether no axis has traffic; False until the first step is done."""
    return store.summary is not None and not axes_with_traffic(store.summary.comm)


def guide(store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
    """Lines that say why there is no traffic and, if there is room, what to do."""
    if store.world == 1:
        return guide_lines("no traffic: the run has one rank", _ONE_RANK, width, height, colours)
    return guide_lines("this run reports no traffic", _UNREPORTED, width, height, colours)
