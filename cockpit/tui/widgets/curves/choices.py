"""The operator's choices on the curves screen: the charts, and how each chart is drawn. This module does not import
Textual."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from cockpit.data.curves.job_metrics import BY_KEY, CURVE_METRICS, CurveMetric
from cockpit.data.curves.segments import half_life
from cockpit.data.scale import Range

ROWS: Final = 7  # rows of a chart, with its heading, if the operator has not chosen the charts
LEAST_ROWS: Final = 5  # with more chosen charts, each shrinks to this height; then they scroll
# half-life of the average as a share of the visible steps; 0: none
SMOOTHING: Final = (
    0.0,
    0.005,
    0.02,
    0.05,
)

RANGES: Final = tuple(Range)


@dataclass
class Choices:
    """Which charts the screen shows, and how. `chosen`: metric keys in display order; None: as many metrics as fit, in
    the default order."""

    chosen: list[str] | None = None
    current: int = 0  # the chart that keys act on
    alone: bool = False  # only the current chart is shown
    smoothing: int = 0  # index into `SMOOTHING`
    logarithmic: set[str] = field(default_factory=set)
    ranges: dict[str, Range] = field(default_factory=dict)
    first: int = 0  # the topmost shown chart

    def charts(self, known: Sequence[CurveMetric], rows: int) -> list[CurveMetric]:
        """The metrics of all charts, including charts that do not fit. `known`: the metrics that the run reports;
        `rows`: the height that the charts may fill, in rows."""
        if self.chosen is not None:
            return [BY_KEY[key] for key in self.chosen]
        return list(known)[: max(1, rows // ROWS)] or [CURVE_METRICS[0]]

    def visible(self, count: int, rows: int) -> range:
        """The indices of the visible charts among `count` charts. The current chart is always visible."""
        self.current = max(0, min(self.current, count - 1))
        if self.alone:
            return range(self.current, self.current + 1)
        fit = max(1, min(count, rows // LEAST_ROWS))
        self.first = max(0, min(self.first, self.current, count - fit))
        self.first = max(self.first, self.current - fit + 1)
        return range(self.first, self.first + fit)

    def half_life(self, steps: int) -> int | None:
        """The half-life (in steps) of the moving average while `steps` steps are visible. None if no average is
        shown."""
        share = SMOOTHING[self.smoothing]
        return half_life(steps, share) if share else None

    def range_of(self, key: str) -> Range:
        return self.ranges.get(key, Range.AUTO)

    def key(self) -> object:
        """A tuple of the choices on which the drawing depends; if it changes, the charts are drawn again."""
        chosen = None if self.chosen is None else tuple(self.chosen)
        return (
            chosen,
            self.current,
            self.alone,
            self.smoothing,
            frozenset(self.logarithmic),
            tuple(self.ranges.items()),
        )
