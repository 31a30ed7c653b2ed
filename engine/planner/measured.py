"""Measurements of a run as the planner uses them: step times with their errors, and the imbalance of expert loads."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

BLOCK = 10  # number of steps in a block, whose mean counts as one measurement


@dataclass(frozen=True)
class Times:
    """Step times in seconds, in chronological order. `block`: number of consecutive steps whose mean counts as one
    measurement."""

    steps: Sequence[float]
    block: int = BLOCK

    @property
    def mean(self) -> float:
        return fmean(self.steps)

    @property
    def error(self) -> float:
        """Standard error of the mean, computed from the means of blocks of consecutive steps, because these means are
        less correlated than individual steps."""
        means = self._blocks
        if len(means) >= 3:
            return float(stdev(means) / len(means) ** 0.5)
        return float(stdev(self.steps) / 2) if len(self.steps) > 1 else self.mean

    @property
    def spread(self) -> float:
        """Standard deviation of the block means: how much measurements vary if no knob changes."""
        means = self._blocks
        return stdev(means) if len(means) >= 3 else 2 * self.error

    @property
    def noise(self) -> float:
        """Standard error of the difference between the mean of these steps and a later measurement."""
        return float((self.error**2 + self.spread**2) ** 0.5)

    @property
    def _blocks(self) -> list[float]:
        times = list(self.steps)[len(self.steps) % self.block :]
        return [fmean(times[n : n + self.block]) for n in range(0, len(times), self.block)]


def imbalance(loads: Sequence[Sequence[int]], ranks: int) -> float:
    """Load of the most loaded expert-parallel rank relative to the mean load, averaged over layers."""
    found = []
    for load in filter(any, loads):
        each = len(load) // ranks
        by_rank = [sum(load[rank * each : (rank + 1) * each]) for rank in range(ranks)]
        found.append(max(by_rank) * ranks / sum(by_rank))
    return fmean(found) if found else 1.0
