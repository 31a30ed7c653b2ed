"""Calibrates and checks the interval for the ratio of two predicted step times (`engine.planner.search.order`).

A pair is two published measurements of the same workload: same source, release, model, GPUs, batch, sequence length and
precision. The error of a pair is the difference between the log errors of its two predictions. The limits of the
interval are quantiles of the errors of pairs whose source was left out of the fit. The planner says which layout of a
pair is faster only if the predicted ratio of the step times exceeds the limit, or if both layouts split their layers in
the same way and one of them is slower in total and not faster in any phase (computation, bubble, ...). Otherwise it
leaves the pair open.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import exp, log
from typing import NamedTuple

import numpy as np

from engine.planner.search.order import limits, same_split, slower_in_all
from tests.bench.published.rows import Row

APART = 0.08  # minimum relative difference of the measured times of two layouts whose order is checked
LEVELS = (0.85, 0.9, 0.95, 0.98)  # shares of the pairs whose ratio an interval holds


class Predicted(NamedTuple):
    """A published measurement and the planner's prediction for it: log(predicted / measured), and the predicted seconds
    of each phase (computation, bubble, ...)."""

    row: Row
    error: float
    phases: Mapping[str, float]


class Pair(NamedTuple):
    """The logarithm of the ratio of two layouts' step times: `predicted` and `measured`. `same`: whether both layouts
    split their layers in the same way. `worse`: whether both layouts split their layers in the same way, and one of
    them is slower in total and not faster in any phase."""

    source: str
    same: bool
    worse: bool
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return abs(self.predicted - self.measured)

    @property
    def checked(self) -> bool:
        return abs(self.measured) > log(1 + APART)

    @property
    def wrong(self) -> bool:
        return self.predicted * self.measured <= 0


class Calls(NamedTuple):
    """Counts the planner's decisions for pairs of layouts whose measured step times differ by more than `APART`.
    `called`: pairs for which the planner decides which layout is faster; `wrong`: how many of these decisions are
    wrong; `left_open`: pairs without a decision. `held`: for what fraction of all pairs (whatever their measured step
    times) the error of the predicted ratio is within the limits."""

    called: int
    wrong: int
    left_open: int
    held: float


def ratios(predicted: Iterable[Predicted]) -> list[Pair]:
    """All pairs of published measurements of the same workload (`Row.layouts`)."""
    same: defaultdict[object, list[Predicted]] = defaultdict(list)
    for one in predicted:
        same[one.row.layouts].append(one)
    return [_pair(a, b) for group in same.values() for a, b in combinations(group, 2)]


def _pair(a: Predicted, b: Predicted) -> Pair:
    assert a.row.job and b.row.job
    measured = log(a.row.measured / b.row.measured)
    same = same_split(a.row.job, b.row.job)
    worse = slower_in_all(a.row.job, a.phases, b.row.job, b.phases)
    return Pair(a.row.source, same, worse, measured + a.error - b.error, measured)


def calibrated(pairs: Sequence[Pair], held: float) -> dict[bool, float]:
    """Limits on `Pair.error`, each calibrated so that the errors of a fraction `held` of its pairs are within it. Key
    True: the limit for pairs whose layouts split their layers in the same way; key False: the limit for all other
    pairs. A limit is infinite if `pairs` has no pairs to which it applies."""
    found = {}
    for same in (True, False):
        errors = [pair.error for pair in pairs if pair.same == same]
        found[same] = float(np.quantile(errors, held, method="higher")) if errors else np.inf
    return found


def calls(pairs: Sequence[Pair], within: Mapping[bool, float]) -> Calls:
    checked = [pair for pair in pairs if pair.checked]
    called = [pair for pair in checked if pair.worse or abs(pair.predicted) > within[pair.same]]
    held = sum(pair.error <= within[pair.same] for pair in pairs) / len(pairs)
    return Calls(len(called), sum(pair.wrong for pair in called), len(checked) - len(called), held)


def left_out_calls(pairs: Sequence[Pair], held: float) -> dict[str, Calls]:
    """Counts the planner's decisions for the pairs of each source, with limits calibrated on the pairs of all other
    sources."""
    return {
        source: calls(
            [pair for pair in pairs if pair.source == source],
            calibrated([pair for pair in pairs if pair.source != source], held),
        )
        for source in sorted({pair.source for pair in pairs})
    }


def summary(fitted: Sequence[Pair], left_out: Sequence[Pair]) -> list[str]:
    """Lines of a report. The first line counts the pairs for which the planner says which layout is faster, how many of
    these statements are wrong, and the pairs that it leaves open; the predictions (`fitted`) come from the stored fit
    of the planner's efficiencies, and the limits from order.toml. `left_out`: pairs predicted by a fit that did not use
    the source of the pair. If there are any, a table reports these counts for each confidence level in LEVELS. Further
    lines then report the counts for each source, at the confidence level that order.toml states for its limits. The
    limits for the left-out pairs of a source are calibrated on the other sources."""
    stored = limits()
    now = calls(fitted, {True: log(stored.same_split), False: log(stored.other_split)})
    lines = [
        f"order, with the stored fit and limits ({stored.same_split:.2f} and {stored.other_split:.2f}): "
        f"{now.called} pairs called, {now.wrong} of them wrongly, {now.left_open} left open"
    ]
    if not left_out:
        return lines
    lines += [
        "| interval | limits: same split | other | stored fit: called | wrongly | open "
        "| left out: called | wrongly | open | held |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for level in LEVELS:
        within = calibrated(left_out, level)
        known, parts = calls(fitted, within), left_out_calls(left_out, level)
        called, wrong, left_open = (sum(part[n] for part in parts.values()) for n in range(3))
        held = sum(part.held * sum(pair.source == name for pair in left_out) for name, part in parts.items())
        cells = [
            f"{level:.0%}", f"{exp(within[True]):.2f}", f"{exp(within[False]):.2f}",
            *map(str, known[:3]), str(called), str(wrong), str(left_open), f"{held / len(left_out):.0%}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        f"left out at {stored.held:.0%}: {name}: {part.called} called, {part.wrong} wrongly, {part.left_open} open"
        for name, part in left_out_calls(left_out, stored.held).items()
    ]
    return lines
