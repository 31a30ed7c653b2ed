"""The names of the filter language: numbers, strings and flags of each rank, and statistics over the ranks."""

import re
from collections.abc import Callable, Mapping, Set

from agents.alerts.finding import peer_baseline
from cockpit.data import metrics
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.filter.syntax import Vocabulary
from cockpit.data.metrics import METRICS, OWN_TIME, STEP_TIME, Metric, available, read
from cockpit.data.ranks.rank_levels import levels_of
from cockpit.data.store import Store, Topic

Numbers = Callable[[Store, int | None], Mapping[int, float | None]]
"""A number by rank, at a step; None is the newest."""

Statistic = Callable[[Store, Mapping[int, float]], Mapping[int, float] | float | None]
"""A value by rank, or one for all of them, from the finite values of the ranks; None if there are none."""

UNITS = {
    "": "",
    "tok": "",
    "ms": "_ms",
    "%": "_percent",
    "MB": "_mb",
    "MiB": "_mib",
    "GiB": "_gib",
    "tok/s": "_tok_s",
    "W": "_w",
    "°C": "_c",
    "MHz": "_mhz",
}
"""The suffix that the unit of a metric adds to its key."""

TEXTS: dict[str, tuple[str, Callable[[Store], dict[int, str]]]] = {
    "host": ("name of the machine", lambda store: {r: one.host for r, one in store.state.hellos.items()}),
    "node": ("same as host", lambda store: {r: one.host for r, one in store.state.hellos.items()}),
}


def _alert(store: Store) -> set[int]:
    return {rank for alert in store.state.alerts.values() for rank in alert.ranks}


def _lost(store: Store) -> set[int]:
    return {rank for rank, gone in store.state.gone.items() if not gone.clean}


def _slow(store: Store) -> set[int]:
    metric = available(store)[0]
    levels = levels_of(store, metric, read(store, metric))
    return {rank for rank, level in levels.items() if level is Level.WARN}


FLAGS: dict[str, tuple[str, Callable[[Store], Set[int]]]] = {
    "alert": ("an active alert names the rank", _alert),
    "lost": ("the rank is lost", _lost),
    "slow": ("marked slow or stalled in the rank grid", _slow),
}


def _same(pick: Callable[[list[float]], float | None]) -> Statistic:
    """A statistic that computes one number from the values of all ranks, such as the median."""
    return lambda store, values: pick(list(values.values())) if values else None


def _peers(store: Store, values: Mapping[int, float]) -> dict[int, float]:
    groups: dict[tuple[int, ...], dict[int, float]] = {}
    for rank, group in metrics.peers(store).items():
        if rank in values:
            groups.setdefault(group, {})[rank] = values[rank]
    return {rank: value for group in groups.values() for rank, value in peer_baseline(group).items()}


STATISTICS: dict[str, tuple[str, Statistic]] = {
    "median": ("median over all ranks", _same(metrics.median)),
    "peers": ("median over the rank's pipeline stage", _peers),
    "max": ("highest value of a rank", _same(max)),
    "min": ("lowest value of a rank", _same(min)),
}

_RESERVED = {*TEXTS, *FLAGS, *STATISTICS}


def numbers(store: Store) -> dict[str, tuple[str, Numbers]]:
    """The per-rank numbers that a filter may use. Each name maps to a description of the number and a function that
    returns its values by rank."""
    return store.once("filter names", (Topic.GRID, Topic.RANKS), lambda: _numbers(store))


def _numbers(store: Store) -> dict[str, tuple[str, Numbers]]:
    found: dict[str, tuple[str, Numbers]] = {
        "rank": ("number of the rank", lambda store, _: {rank: rank for rank in store.state.hellos}),
        "step": (
            "newest step of the rank",
            lambda store, _: {r: s.step for r, s in store.state.steps.items()},
        ),
    }
    for axis in store.axes():
        _add(found, axis, f"coordinate on the axis {axis}", _coordinates(axis))
    metrics_of_run = dict.fromkeys([OWN_TIME, STEP_TIME, *available(store), *METRICS])
    for metric in metrics_of_run:
        _add(found, name_of(metric), metric.title, _values(metric))
    return found


def _add(found: dict[str, tuple[str, Numbers]], name: str, about: str, values: Numbers) -> None:
    """Add a name that filters may use, unless it is already in use. The names of axes and phases come from the run, so
    characters that are illegal in a filter become ``_``.
    """
    name = re.sub(r"\W|^(?=\d)", "_", name, flags=re.ASCII)
    if name and name not in found and name not in _RESERVED:
        found[name] = (about, values)


def name_of(metric: Metric) -> str:
    """The name of a metric: its key and its unit, such as ``own_ms``."""
    return metric.key.removeprefix("phase:") + UNITS.get(metric.unit, "")


def _coordinates(axis: str) -> Numbers:
    return lambda store, _: {rank: hello.coords.get(axis) for rank, hello in store.state.hellos.items()}


def _values(metric: Metric) -> Numbers:
    def values(store: Store, step: int | None) -> dict[int, float | None]:
        readings = read(store, metric, at=step)
        return dict(zip(readings.ranks, readings.values_, strict=True))

    return values


def vocabulary(store: Store) -> Vocabulary:
    """The names that a filter on this run may use."""
    return Vocabulary(
        {name: about for name, (about, _) in numbers(store).items()},
        {name: about for name, (about, _) in TEXTS.items()},
        {name: about for name, (about, _) in FLAGS.items()},
        {name: about for name, (about, _) in STATISTICS.items()},
    )
