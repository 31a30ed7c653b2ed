"""Fits the planner's efficiencies to published step times and writes them to files. A row of `tests.bench.published` is
one published step time: of one model in one layout on one kind of GPU.

python -m tests.bench.plan_fit

The fit determines six efficiencies for each hardware generation, and for each framework release a factor that
multiplies the step time. The fit minimises the sum of Huber losses of log(predicted / measured). A row from a source
(such as a paper) with n rows has the weight n^-0.75, so that no source outweighs all others. A weak penalty pulls the
factors towards 1; without it, larger factors and higher efficiencies could cancel out. The fit takes damped
Gauss-Newton steps (Levenberg 1944, Marquardt 1963) on the logarithms.

The intervals of predicted step times are quantiles of the prediction errors on rows that were left out of a fit. For
framework releases with a fitted factor, the errors come from five-fold cross-validation; for all other releases, they
come from fits that leave out all rows of one source at a time. The intervals for the ratio of two step times decide
whether the planner is certain which of two layouts is faster. They are quantiles of the errors of predicted ratios.
Each ratio is that of two rows from one source, predicted with a fit to the other sources.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

import engine.planner.hardware.efficiency as stored
import engine.planner.search.order as known_order
import engine.planner.timing.release as known
from engine.planner.hardware.description import Efficiency
from engine.planner.hardware.table import hardware
from engine.planner.timing.predict import predict
from engine.planner.timing.step import Prediction
from tests.bench.planner.order import Predicted, calibrated, ratios
from tests.bench.published.rows import Row, rows

Floats = npt.NDArray[np.float64]
NAMES = ("gemm", "half_rows", "attention", "memory", "link", "operation")
BOUNDS = {
    "gemm": (0.3, 0.98), "half_rows": (1.0, 2000.0), "attention": (0.05, 0.95), "memory": (0.2, 0.98),
    "link": (0.1, 1.0), "operation": (1e-7, 3e-4),
}  # fmt: skip
HUBER = 0.1  # the loss of log(predicted / measured) is quadratic up to this value, then linear
PULL = 0.02  # weight of the penalty on the logarithm of a factor
STEP = 0.03  # step in a logarithm for numerical derivatives
HELD = 0.85  # share of the rows whose measured time the interval should hold
# Share of the pairs whose ratio the interval of ratios should hold: the smallest level of
# `tests.bench.planner.order.LEVELS` at which no pair of a left-out source is called wrongly.
ORDER_HELD = 0.98
FOLDS = 5


@dataclass(frozen=True)
class Fit:
    """The fitted efficiencies of each hardware generation, and the fitted factor of each framework release."""

    efficiency: Mapping[str, Efficiency]
    factors: Mapping[str, float]

    def factor(self, release: str) -> float:
        """The factor that multiplies the step times predicted for a framework release; for a release that was not
        fitted, the geometric mean of all factors."""
        mean = exp(float(np.mean(np.log([*self.factors.values()]))))
        return self.factors.get(release, mean)

    def predicted(self, row: Row) -> Predicted:
        factor = self.factor(row.release)
        found = raw_prediction(row, self.efficiency[row.generation])
        phases = {cause: seconds * factor for cause, seconds in found.phases.items()}
        return Predicted(row, log(found.step_s[1] * factor / row.measured), phases)

    def errors(self, of: Iterable[Row]) -> Floats:
        """log(predicted / measured)."""
        return np.array([self.predicted(row).error for row in of])


def raw_prediction(row: Row, efficiency: Efficiency) -> Prediction:
    """The prediction for a row (a published step time), without the factor of its framework release."""
    assert row.job
    traits = msgspec.structs.replace(known.releases()[row.release], factor=1.0)
    return predict(row.job, msgspec.structs.replace(hardware(row.gpu), efficiency=efficiency), traits)


def raw_seconds(row: Row, efficiency: Efficiency) -> float:
    return raw_prediction(row, efficiency).step_s[1]


def stored_fit() -> Fit:
    return Fit(stored.efficiencies(), {name: release.factor for name, release in known.releases().items()})


def fit(
    of: Sequence[Row], start: Fit, rounds: int = 15, say: Callable[[str], object] = lambda _: None
) -> Fit:
    """Fit the efficiencies of each GPU generation and the factors of each framework release to published step times
    (the argument `of`). The Jacobian has six columns for each generation, which are zero for step times on other
    generations, then a column for each factor."""
    generations, releases = sorted({row.generation for row in of}), sorted({row.release for row in of})
    mine = np.array([generations.index(row.generation) for row in of])
    whose = np.array([releases.index(row.release) for row in of])
    counts = Counter(row.source for row in of)
    weight = np.array([counts[row.source] ** -0.75 for row in of] + [PULL] * len(releases))
    measured, n, six = np.log([row.measured for row in of]), len(of), len(NAMES)
    low, high = (np.log([BOUNDS[name][side] for name in NAMES]) for side in (0, 1))

    def predicted(x: Floats) -> Floats:
        each = [Efficiency(**dict(zip(NAMES, np.exp(line).tolist(), strict=True))) for line in x]
        return np.log([raw_seconds(row, each[at]) for row, at in zip(of, mine, strict=True)])

    def residuals(raw: Floats, factors: Floats) -> Floats:
        return np.concatenate([raw + factors[whose] - measured, factors])

    def loss(e: Floats) -> float:
        a = np.abs(e)
        return float((weight * np.where(a < HUBER, a**2 / 2, HUBER * (a - HUBER / 2))).sum())

    x = np.log([[getattr(start.efficiency[g], name) for name in NAMES] for g in generations]).clip(low, high)
    factors = np.log([start.factor(name) for name in releases])
    raw, damping = predicted(x), 1e-2
    e = residuals(raw, factors)
    best = loss(e)
    for _ in range(rounds):
        jacobian = np.zeros((n + len(releases), six * len(generations) + len(releases)))
        for k in range(six):
            step = np.where(x[:, k] + STEP <= high[k], STEP, -STEP)
            moved = x.copy()
            moved[:, k] += step
            jacobian[np.arange(n), six * mine + k] = (predicted(moved) - raw) / step[mine]
        jacobian[np.arange(n), six * len(generations) + whose] = 1
        jacobian[n + np.arange(len(releases)), six * len(generations) + np.arange(len(releases))] = 1
        pull = weight / np.maximum(1, np.abs(e) / HUBER)
        normal, gradient = jacobian.T @ (pull[:, None] * jacobian), jacobian.T @ (pull * e)
        before = best
        for _ in range(5):
            change = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), gradient)
            tried = (x - change[: x.size].reshape(x.shape)).clip(low, high)
            moved_raw, moved_factors = predicted(tried), factors - change[x.size :]
            moved_e = residuals(moved_raw, moved_factors)
            if loss(moved_e) < best:
                x, raw, factors, e, best = tried, moved_raw, moved_factors, moved_e, loss(moved_e)
                damping /= 4
                break
            damping *= 5
        say(f"loss {best:.5f}")
        if before - best < 2e-4 * best:
            break
    each = {
        g: Efficiency(**dict(zip(NAMES, np.exp(line).tolist(), strict=True)))
        for g, line in zip(generations, x, strict=True)
    }
    return Fit(each, dict(zip(releases, np.exp(factors).tolist(), strict=True)))


def left_out(published: Sequence[Row], start: Fit, rounds: int = 2) -> dict[str, list[Predicted]]:
    """For each source (such as a paper), predict its step times with a fit to those of the other sources on the same
    GPU generations. A framework release that only this source measured gets the geometric mean of the other releases'
    fitted factors."""
    found: dict[str, list[Predicted]] = {}
    for source in {row.source for row in published}:
        mine = [row for row in published if row.source == source]
        reached = {row.generation for row in mine}
        others = [row for row in published if row.source != source and row.generation in reached]
        if reached <= {row.generation for row in others}:
            result = fit(others, start, rounds)
            found[source] = [result.predicted(row) for row in mine]
    return found


def folded(published: Sequence[Row], start: Fit) -> list[Predicted]:
    """Cross-validation with `FOLDS` folds: predict each published step time with a fit to those of the other folds."""
    order = np.random.default_rng(0).permutation(len(published))
    found: list[Predicted] = []
    for fold in range(FOLDS):
        out = {int(n) for n in order[fold::FOLDS]}
        result = fit([row for n, row in enumerate(published) if n not in out], start, 3)
        found += [result.predicted(published[n]) for n in sorted(out)]
    return found


def spreads(errors: Iterable[Predicted]) -> dict[tuple[str, str], tuple[float, float]]:
    """For each GPU generation and kind of model (dense or with routed experts), the central interval of the ratios
    measured / predicted; it contains the share `HELD` of them."""
    groups: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for row, error, _ in errors:
        groups[row.generation, row.kind].append(-error)
    tail = (1 - HELD) / 2
    return {
        key: (exp(np.quantile(es, tail, method="lower")), exp(np.quantile(es, 1 - tail, method="higher")))
        for key, es in groups.items()
    }


def write(
    found: Fit,
    same: Mapping[tuple[str, str], tuple[float, float]],
    new: Mapping[tuple[str, str], tuple[float, float]],
    order: Mapping[bool, float],
) -> None:
    """Write efficiency.toml and order.toml, and the factors into releases.toml. `order`: the result of
    `tests.bench.planner.order.calibrated`, for order.toml."""
    lines = [
        "# Attained shares of peaks by hardware generation, and the interval: measured over predicted seconds of the",
        "# middle 85 % of rows that were left out of the fit, by kind of model, for known and for unknown releases.",
        "# Written by `python -m tests.bench.plan_fit` from tests/bench/published.",
    ]
    for generation in sorted(found.efficiency):
        lines += ["", f"[{generation}]"]
        lines += [f"{name} = {getattr(found.efficiency[generation], name):.4g}" for name in NAMES]
        for label, table in (("", same), (" unknown", new)):
            lines += [
                f'spread."{kind}{label}" = [{low:.3f}, {high:.3f}]'
                for (at, kind), (low, high) in sorted(table.items())
                if at == generation
            ]
    (Path(stored.__file__).parent / "efficiency.toml").write_text("\n".join(lines) + "\n")
    write_order(order)
    path = Path(known.__file__).parent / "releases.toml"
    head, *sections = re.split(r"(?m)^(?=\[)", path.read_text())
    renewed = []
    for section in sections:
        title, rest = section.split("\n", 1)
        factor = found.factors.get(title.strip('["]'))
        rest = re.sub(r"(?m)^factor = .*\n", "", rest)
        renewed.append(title + "\n" + (f"factor = {factor:.4g}\n" if factor else "") + rest)
    path.write_text(head + "".join(renewed))


def write_order(order: Mapping[bool, float]) -> None:
    path = Path(known_order.__file__).parent / "order.toml"
    head = path.read_text().split("held = ")[0]
    numbers = f"same_split = {exp(order[True]):.3f}\nother_split = {exp(order[False]):.3f}\n"
    path.write_text(f"{head}held = {ORDER_HELD}\n{numbers}")


def main() -> None:
    published = [row for row in rows() if row.job]
    found = fit(published, stored_fit(), say=print)
    for generation, efficiency in sorted(found.efficiency.items()):
        print(generation, {name: float(f"{getattr(efficiency, name):.4g}") for name in NAMES})
    same = spreads(folded(published, found))
    apart = [error for errors in left_out(published, found).values() for error in errors]
    new, order = spreads(apart), calibrated(ratios(apart), ORDER_HELD)
    print(same, new, order, sep="\n")
    write(found, same, new, order)


if __name__ == "__main__":
    main()
