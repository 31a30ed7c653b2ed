"""Finds the layouts that train a model the fastest on a given number of devices and fit into the devices' memory.

Choices are sorted by their lower bound on step time, and choices whose lower bound on memory exceeds the device's
memory are left out. The search then computes the full plan of one remaining choice after another, the one with the
lowest bound on step time first (best-first). It stops when no remaining bound beats the results found so far (branch
and bound), or after `MOST_PLANS` plans.
"""

from collections import Counter
from dataclasses import dataclass

from engine.config.checks.layout_checks import refusals
from engine.config.layout import Layout
from engine.config.refusal import RefusedError
from engine.planner.hardware.description import Hardware
from engine.planner.search.bounds import Bounds
from engine.planner.search.order import certain
from engine.planner.search.space import Choice, choices
from engine.planner.what_if import WhatIf, as_run, assumed_hardware, what_if

MOST_RANKS = 65_536
MOST_PLANS = 400  # maximum number of choices that are planned exactly
MOST_SHOWN = 100
MARGIN = 0.97  # maximum share of a device's memory in use; the memory model has an error of about 3 %
LOOSE = 0.95  # the lower bound on memory is multiplied by this, because it can be too high if layers differ


@dataclass(frozen=True)
class Found:
    """A candidate layout of the search (`choice`) and the planner's full plan of it."""

    choice: Choice
    plan: WhatIf

    @property
    def seconds(self) -> float:
        assert self.plan.time
        return self.plan.time.step_s[1]

    def surely_differs_from(self, other: WhatIf) -> bool:
        """Whether the predictions are certain enough to tell which of the two layouts is faster."""
        assert self.plan.time and other.time
        return certain(self.plan.job, self.plan.time.phases, other.job, other.time.phases)


@dataclass(frozen=True)
class Result:
    """`best`: the fastest choice of each shape (see `Choice.shape`), fastest shape first. `nearest`: if no choice fits
    into memory, the one that needs the least. `counts`: number of choices by outcome, such as "planned" or "too
    large"."""

    layout: Layout
    hardware: Hardware
    best: tuple[Found, ...]
    nearest: Found | None
    counts: dict[str, int]

    @property
    def candidates(self) -> tuple[bool, ...]:
        """For each result, whether it may be the fastest: it is the first, or it is not certain to be slower than the
        first."""
        return tuple(
            not (number and self.best[0].surely_differs_from(one.plan))
            for number, one in enumerate(self.best)
        )

    @property
    def tied(self) -> int:
        """The number of results that may be the fastest layout."""
        return sum(self.candidates)


def search(layout: Layout, ranks: int, hardware: Hardware | None = None, top: int = 5) -> Result:
    """Find the `top` layouts with the most predicted tokens per second on `ranks` ranks, at most one of each shape (see
    `Choice.shape`). Raises RefusedError."""
    hardware = as_run(layout, hardware or assumed_hardware(layout))
    if hardware is None:
        raise RefusedError("a search needs a machine: give --hardware NAME or FILE, or a section [hardware]")
    for name, value, most in (("--gpus", ranks, MOST_RANKS), ("--top", top, MOST_SHOWN)):
        if not 1 <= value <= most:
            raise RefusedError(f"{name} = {value} is not legal; legal: a whole number from 1 to {most}")
    what_if(layout, hardware)  # raises an error for an unknown release or precision
    return _Search(layout, ranks, hardware, top).result()


class _Search:
    def __init__(self, layout: Layout, ranks: int, hardware: Hardware, top: int):
        self.layout, self.ranks, self.hardware, self.top = layout, ranks, hardware, top
        self.bounds = Bounds(layout, hardware, layout.plan.release)
        self.counts: Counter[str] = Counter()
        self.best: dict[tuple[int, ...], Found] = {}

    def result(self) -> Result:
        capacity = MARGIN * self.hardware.device.memory_bytes
        bounded: list[tuple[float, Choice]] = []
        least: tuple[float, Choice] | None = None
        for choice in choices(self.layout, self.ranks, self.hardware.links[0].ranks):
            self.counts["considered"] += 1
            size = LOOSE * self.bounds.bytes(choice)
            if size > capacity:
                self.counts["too large by the bound"] += 1
                if least is None or size < least[0]:
                    least = size, choice
            else:
                bounded.append((self.bounds.seconds(choice), choice))
        if not self.counts["considered"]:
            raise RefusedError(
                f"no legal layout has {self.ranks} ranks; legal: a number whose divisors suit model.layers = "
                f"{self.layout.model.layers}, model.heads = {self.layout.model.heads} and train.global_batch = "
                f"{self.layout.train.global_batch}"
            )
        bounded.sort()
        nearest = self._try_all(bounded, capacity)
        if not self.best and nearest is None and least:
            nearest = self._plan(least[1])
        ranked = sorted(self.best.values(), key=lambda found: found.seconds)[: self.top]
        return Result(
            self.layout, self.hardware, tuple(ranked), None if ranked else nearest, dict(self.counts)
        )

    def _try_all(self, bounded: list[tuple[float, Choice]], capacity: float) -> Found | None:
        """Plan one choice after another, the one with the lowest bound on the step time first. Returns the plan with
        the least memory among those that do not fit, if there is one."""
        nearest: Found | None = None
        for seconds, choice in bounded:
            if self._is_done(seconds) or self.counts["planned"] >= MOST_PLANS:
                break
            known = self.best.get(choice.shape)
            if known and known.seconds <= seconds:
                continue
            found = self._plan(choice)
            if found is None:
                continue
            self.counts["planned"] += 1
            if found.plan.memory.peak > capacity:
                self.counts["too large"] += 1
                if nearest is None or found.plan.memory.peak < nearest.plan.memory.peak:
                    nearest = found
            elif known is None or found.seconds < known.seconds:
                self.best[choice.shape] = found
        return nearest

    def _is_done(self, seconds: float) -> bool:
        """Whether the search can stop: the `top` best shapes found so far all take at most `seconds`, which is the
        lower bound on the step time of all remaining choices."""
        if len(self.best) < self.top:
            return False
        return sorted(found.seconds for found in self.best.values())[self.top - 1] <= seconds

    def _plan(self, choice: Choice) -> Found | None:
        layout = choice.of(self.layout)
        if next(refusals(layout), None):
            self.counts["refused"] += 1
            return None
        return Found(choice, what_if(layout, self.hardware))
