"""For each group of ranks and each step in the history, the worst deviation of a metric from its reference (the peers'
median or the rank's own earlier steps); computed a few steps at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cockpit.data.history.ranks import ANEW, NAN, Gather
from cockpit.data.metrics import Against, Metric, own_baselines, peer_medians, settled_step
from cockpit.data.store import Store, Topic

AT_ONCE = 60_000  # maximum number of values that one call computes, which takes a few ms
UNSETTLED = 2  # number of newest steps that are computed again each time, because ranks still report them
REFRESH_OWN = 64  # after this many steps, deviations from a rank's own earlier steps are computed again

Row = Sequence[int]  # ranks of one row


@dataclass
class RowHistory:
    """For each row of ranks on the screen, the worst value of a metric at each step. `complete` is false until all
    requested steps are computed."""

    _key: object = None
    _done: dict[int, list[float]] = field(default_factory=dict)  # by step
    _compute: "_Computer | None" = None
    complete: bool = True

    def values(
        self, store: Store, metric: Metric, against: Against, rows: tuple[Row, ...], steps: Sequence[int]
    ) -> dict[int, list[float]]:
        """For each step, one value for each row of ranks: the worst deviation of the metric on any rank of the row.
        With `Against.NOTHING`, it is the metric's highest value in the row, or the lowest if less is worse. NaN: no
        value. The newest steps are computed first. One call computes a limited number of steps; later calls compute the
        rest."""
        history = store.rank_history
        key = (
            *(
                metric.key,
                against,
                store.revisions[Topic.GRID],
                history.added // ANEW,
                len(history.ranks),
                rows,
            ),
            history.added // REFRESH_OWN if against is Against.OWN else None,
        )
        if key != self._key or self._compute is None:
            self._key, self._done = key, {}
            self._compute = _Computer(store, metric, against, rows)
        kept = set(steps)
        self._done = {step: values for step, values in self._done.items() if step in kept}
        settled = settled_step(store)
        for step in [one for one in self._done if settled is None or one > settled - UNSETTLED]:
            del self._done[step]
        missing = [step for step in reversed(steps) if step not in self._done]
        room = UNSETTLED + max(1, AT_ONCE // max(1, len(store.state.hellos)))
        for step in missing[:room]:
            self._done[step] = self._compute(store, step)
        self.complete = len(missing) <= room
        return self._done


class _Computer:
    """Computes one value for each row of ranks at a step."""

    def __init__(self, store: Store, metric: Metric, against: Against, rows: Sequence[Row]) -> None:
        self._metric, self._against = metric, against
        places = store.rank_history.places
        unknown = len(places)
        self._in_order = Gather([places.get(rank, unknown) for rank in store.state.hellos])
        at = {rank: place for place, rank in enumerate(store.state.hellos)}
        self._rows = [Gather([at[rank] for rank in row]) for row in rows]
        self._own = list(self._in_order(own_baselines(store, metric))) if against is Against.OWN else []
        self._pick = _lowest if metric.worse < 0 else _highest

    def __call__(self, store: Store, step: int) -> list[float]:
        values: Sequence[float] = self._in_order(store.rank_history.column(self._metric.key, step))
        if self._against is not Against.NOTHING:
            bases = self._own or peer_medians(store, values)
            values = [
                v / m - 1 if m else (0.0 if v == v else NAN) for v, m in zip(values, bases, strict=True)
            ]
        return [self._pick(row(values)) for row in self._rows]


def _highest(values: Sequence[float]) -> float:
    total = sum(values)  # NaN if any value is NaN, because `max` is then undefined
    return max(values) if total == total else max((v for v in values if v == v), default=NAN)


def _lowest(values: Sequence[float]) -> float:
    total = sum(values)
    return min(values) if total == total else min((v for v in values if v == v), default=NAN)


def fold(ranks: Sequence[int], rows: int, band: int) -> tuple[Row, ...]:
    """Split `ranks` into at most `rows` screen rows, each with consecutive ranks. `band`: the number of consecutive
    ranks that belong together, such as those of a pipeline stage or a node; if there are enough rows, no row contains
    ranks of two such bands.
    """
    if not ranks or rows < 1:
        return ()
    least = -(-len(ranks) // rows)
    aligned = (size for size in range(least, band + 1) if band % size == 0)
    size = next(aligned, least) if least <= band else -(-least // band) * band
    return tuple(tuple(ranks[i : i + size]) for i in range(0, len(ranks), size))
