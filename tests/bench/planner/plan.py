"""Compares predicted with published step times: `python -m tests.bench plan [--quick] [--pairs]`.

For each source of published step times (such as a paper), the benchmark reports the prediction error with the fitted
efficiencies, and the error if the fit leaves out this source. The benchmark also reports how many measured times lie in
the predicted interval, and for how many pairs of layouts of the same workload the planner correctly predicts which
layout is faster. Finally, the benchmark reports for how many pairs the planner is certain enough to decide which layout
is faster (`tests.bench.planner.order`). With `--pairs`, the benchmark lists the pairs for which the planner predicts
the wrong layout to be faster, with the line number of each published measurement in its file. The benchmark always
lists the published measurements for which the planner has no prediction.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

import numpy as np

from engine.planner.hardware.efficiency import efficiencies
from engine.planner.hardware.table import hardware
from engine.planner.timing.predict import predict
from engine.planner.timing.release import releases
from tests.bench.plan_fit import NAMES, left_out, stored_fit
from tests.bench.planner.order import APART, Predicted, ratios, summary
from tests.bench.published.rows import Row, rows


@dataclass(frozen=True)
class Result:
    """A published measurement and its predicted step time in seconds; `low` and `high` are the ends of the predicted
    interval. `phases`: the predicted seconds of each phase (computation, bubble, ...)."""

    row: Row
    low: float
    mid: float
    high: float
    phases: Mapping[str, float]

    @property
    def error(self) -> float:
        return self.mid / self.row.measured - 1

    @property
    def held(self) -> bool:
        return self.low <= self.row.measured <= self.high

    @property
    def group(self) -> tuple[str, str, str]:
        return self.row.generation, self.row.source, self.row.kind


def results(published: Iterable[Row]) -> list[Result]:
    """Predictions, with the stored efficiencies, for all published measurements that have a `Job`."""
    found = [(row, predict(row.job, hardware(row.gpu), row.release)) for row in published if row.job]
    return [Result(row, *prediction.step_s, prediction.phases) for row, prediction in found]


def pairs(found: Sequence[Result]) -> list[tuple[Result, Result]]:
    """Pairs of layouts of the same workload whose measured times differ by more than `APART`, the faster layout
    first."""
    same: defaultdict[object, list[Result]] = defaultdict(list)
    for result in found:
        same[result.row.layouts].append(result)
    return [
        (fast, slow)
        for group in same.values()
        for fast in group
        for slow in group
        if fast.row.measured * (1 + APART) < slow.row.measured
    ]


def table(found: Sequence[Result], without: dict[tuple[str, str, str], list[float]]) -> list[str]:
    """The table of the planner's errors, with one line for each source of published measurements."""
    lines = [
        "| generation | source | kind | rows | mean | p90 | bias | in interval | pairs | left out: mean | p90 |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    groups: defaultdict[tuple[str, str, str], list[Result]] = defaultdict(list)
    for result in found:
        groups[result.group].append(result)
    lines += [_line(name, groups[name], without.get(name, [])) for name in sorted(groups)]
    for label, keep in SUMS.items():
        of = [result for result in found if keep(result)]
        out = [error for name, errors in without.items() for error in errors if keep(_of(groups[name]))]
        lines.append(_line(("**" + label + "**", "", ""), of, out))
    return lines


def _of(group: Sequence[Result]) -> Result:
    return group[0]


SUMS: dict[str, Callable[[Result], bool]] = {
    "dense A100 and H100": lambda r: not r.row.routed and r.row.generation != "Blackwell",
    "dense H100": lambda r: not r.row.routed and r.row.generation == "Hopper",
    "MoE H100": lambda r: r.row.routed and r.row.generation == "Hopper",
    "Blackwell": lambda r: r.row.generation == "Blackwell",
    "all": lambda r: True,
}


def _line(name: tuple[str, str, str], of: Sequence[Result], out: Sequence[float]) -> str:
    errors = np.abs([result.error for result in of])
    bias = np.mean([result.error for result in of])
    ordered = pairs(of)
    right = sum(fast.mid < slow.mid for fast, slow in ordered)
    cells = [
        *name,
        str(len(of)),
        f"{errors.mean():.1%}",
        f"{np.quantile(errors, 0.9):.1%}",
        f"{bias:+.1%}",
        f"{np.mean([result.held for result in of]):.0%}",
        f"{right} of {len(ordered)}" if ordered else "-",
    ]
    apart = np.abs(out) if len(out) else None
    cells += [f"{apart.mean():.1%}", f"{np.quantile(apart, 0.9):.1%}"] if apart is not None else ["-", "-"]
    return "| " + " | ".join(cells) + " |"


def lines(published: Sequence[Row]) -> dict[int, int]:
    """Maps the `id()` of each published measurement to its line number in its source's file. The header is line 1."""
    counts: defaultdict[str, int] = defaultdict(lambda: 1)
    found = {}
    for row in published:
        counts[row.source] += 1
        found[id(row)] = counts[row.source]
    return found


def wrong_pairs(published: Sequence[Row]) -> list[str]:
    """A sentence for each pair whose slower layout is predicted to be at least as fast as the other layout."""
    at = lines(published)

    def text(one: Result) -> str:
        assert one.row.job
        grid, micro = one.row.job.grid, one.row.job.micro_batch
        layout = f"tp {grid.tp} dp {grid.dp} pp {grid.pp} micro-batch {micro}"
        return f"line {at[id(one.row)]} ({layout}) {one.row.measured:.3g} s, predicted {one.mid:.3g}"

    return [
        f"wrong order: {fast.row.source} {fast.row.model}: {text(fast)}; {text(slow)}"
        for fast, slow in pairs(results(published))
        if fast.mid >= slow.mid
    ]


def main() -> None:
    published = rows()
    without: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    apart: list[Predicted] = []
    if "--quick" not in sys.argv:
        for errors in left_out([row for row in published if row.job], stored_fit()).values():
            apart += errors
    for row, error, _ in apart:
        without[row.generation, row.source, row.kind].append(exp(error) - 1)
    found = results(published)
    print("\n".join(table(found, without)))
    fitted = [Predicted(one.row, log(one.mid / one.row.measured), one.phases) for one in found]
    print("\n".join(summary(ratios(fitted), ratios(apart))))
    if "--pairs" in sys.argv:
        print("\n".join(wrong_pairs(published)))
    at = lines(published)
    for row in published:
        if row.job is None:
            print(f"not predicted: {row.source} line {at[id(row)]}, {row.model} on {row.gpu}: {row.note}")
    used = {row.release for row in published if row.job}
    print(
        f"fitted: {len(NAMES)} numbers for each of {len(efficiencies())} generations, {len(used)} release factors"
    )
    assert used <= releases().keys()


__all__ = ["lines", "main", "pairs", "results", "wrong_pairs"]
