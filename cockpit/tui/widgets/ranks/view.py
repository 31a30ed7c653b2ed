"""Functions that panels about ranks share: the chosen metric, grouping and comparison."""

from collections.abc import Iterable, Sequence

from cockpit.data import format
from cockpit.data.filter import matching
from cockpit.data.metrics import Against, Metric, Readings, available, read
from cockpit.data.store import Store, Topic
from cockpit.tui.session import Selection
from cockpit.tui.widgets.ranks.arrangement import NODE, Band, Coords, axes_of, bands, by_node

COMPARED = tuple(Against)


def choice(selection: Selection) -> object:
    """All choices of the user in `selection` (such as rank, metric and step), as a value to compare: a panel about
    ranks is redrawn if it changes."""
    return tuple(vars(selection).values())


def metric_of(store: Store, selection: Selection) -> Metric:
    """The chosen metric; if the run does not have it, the first metric of the run."""
    metrics = available(store)
    return next((metric for metric in metrics if metric.key == selection.metric), metrics[0])


def readings_of(store: Store, selection: Selection, metric: Metric) -> Readings:
    """The metric's value for every rank and its deviation from the baseline, at the selected step or, if no step is
    selected, over the newest steps."""
    return read(store, metric, selection.against, selection.step)


def step_text(store: Store, selection: Selection, metric: Metric) -> str:
    """The part of a title that names the selected step; "" while the screen follows the newest step."""
    if selection.step is None:
        return ""
    kept = len(store.rank_history.column(metric.key, selection.step)) > 0
    return f" · step {format.grouped(selection.step)}" + ("" if kept else " is not kept")


# ------------------------------------------------------------------------------------------- grouping


def coords_of(store: Store) -> dict[int, Coords]:
    return {rank: hello.coords for rank, hello in store.state.hellos.items()}


def groupings(store: Store) -> list[str]:
    """The possible groupings: by each axis on which ranks differ, and by node if there are several nodes."""

    def compute() -> list[str]:
        hosts = {hello.host for hello in store.state.hellos.values()}
        return axes_of(coords_of(store)) + ([NODE] if len(hosts) > 1 else [])

    return store.once("groupings", (Topic.GRID,), compute)


def group_of(store: Store, selection: Selection) -> str | None:
    """The chosen grouping if it is possible, otherwise the outermost axis; None if no grouping is possible."""
    known = groupings(store)
    return selection.group if selection.group in known else next(iter(known), None)


def bands_of(store: Store, group: str | None) -> tuple[Sequence[Band], list[str]]:
    """The ranks grouped into bands, and the labels of the columns. If `group` is `NODE`, the ranks of each node form a
    band; if it is the name of an axis, the ranks with the same coordinate on this axis do; if it is None, all ranks
    form one band."""

    def compute() -> tuple[Sequence[Band], list[str]]:
        if group == NODE:
            hosts = {rank: format.clean(hello.host)[-HOST:] for rank, hello in store.state.hellos.items()}
            return by_node(hosts), []
        return bands(coords_of(store), group)

    return store.once(("bands", group), (Topic.GRID,), compute)


HOST = 16  # columns for the name of a host; its end differs more than its beginning


def filtered(store: Store, selection: Selection, ranks: Iterable[int]) -> list[int]:
    """The `ranks` that match the filter; all of `ranks` without a filter."""
    chosen = matching(store, selection.filter, selection.step)
    return [rank for rank in ranks if chosen is None or rank in chosen]
