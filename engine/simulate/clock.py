"""The times of a simulated step: predicted times of pipeline actions, multiplied by each rank's factors for noise and
scenario events.

The predicted times come from `engine.planner.timing.predict`. The schedule is simulated for all pipelines together.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from engine.planner.hardware.description import Hardware
from engine.planner.schedule import ScheduleClock
from engine.planner.timing.predict import predict, seconds_by_axis
from engine.planner.workload.job import Job
from engine.simulate.cluster import Cluster
from engine.simulate.conditions import Conditions

LAYER_AXES = ("tp", "cp", "ep")  # axes whose collectives run inside pipeline actions
OWN = ("compute", "recompute", "launch")  # causes of time inside actions that do not involve other ranks
IMBALANCE_STEP = 0.02  # imbalances are rounded to multiples of this, so that cached predictions are reused

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Predicted:
    """Predicted times of a step in seconds, without noise. `own`: fraction of each action's time spent on computation.
    `exposed`: by axis, the fraction of each action's time spent in exposed collectives. `collectives`: seconds per step
    in all collectives, exposed or hidden, by axis and pipeline rank. `heat`: extra computation of the most loaded ep
    rank, as a fraction of that rank's computation under an even load."""

    clock: ScheduleClock
    costs: tuple[Floats, ...]  # by pipeline rank: seconds of each action, as in `clock.acts`
    forward: tuple[NDArray[np.bool_], ...]  # by pipeline rank: which actions are forward passes
    own: float
    exposed: dict[str, float]
    collectives: dict[str, Floats]
    heat: float
    pp_s: float
    dp_s: float
    optimizer_s: float


@dataclass(frozen=True)
class StepTimes:
    """Times of one step, in seconds. `bubble`, `schedule` and `bound` are idle times as fractions: `bubble` and
    `schedule` are divided by `window`; `bound` is divided by the shorter window that the pipeline would have if
    transfers took no time. Arrays are [rank] unless a comment states otherwise; `step_s` and `optimizer` are the same
    for all ranks."""

    step_s: float
    forward: Floats
    backward: Floats
    reduce: Floats  # seconds of gradient reduction and of waiting for slower pipelines
    optimizer: float
    exposed: dict[str, Floats]  # by axis: seconds of waiting in collectives and for pipeline neighbours
    collectives: dict[str, Floats]  # by axis: seconds in collectives, exposed or hidden
    bubble: Floats
    schedule: Floats  # share of `window` in which the rank would be idle even without transfers
    bound: Floats  # mean idle share of the pipeline's ranks if transfers took no time
    window: Floats  # seconds from the first forward to the last backward of the rank's pipeline
    ends: list[Floats]  # by pipeline rank: end of each action of the first block
    starts: list[Floats]


class StepClock:
    """Computes the times of a step on all ranks of a cluster."""

    def __init__(self, cluster: Cluster, hardware: Hardware, release: str | None):
        self._cluster, self._hardware, self._release = cluster, hardware, release
        grid = cluster.grid
        self._block_axis = next((axis for axis in ("ep", "tp", "cp") if getattr(grid, axis) > 1), None)
        self.predicted = lru_cache(maxsize=64)(self._predict)

    def _predict(self, job: Job) -> Predicted:
        """Predict the step times of `job` with its own expert imbalance and, for comparison, with an even expert
        load."""
        found = predict(job, self._hardware, self._release)
        even = (
            found
            if job.imbalance <= 1.0
            else predict(replace(job, imbalance=1.0), self._hardware, self._release)
        )
        phases = found.phases
        busy = sum(phases[cause] for cause in (*OWN, *LAYER_AXES)) or 1e-12
        own, own_even = (sum(one.phases[cause] for cause in OWN) for one in (found, even))
        clock = _schedule(job.schedule, job.grid.pp, job.virtual_stages, job.micro_batches)
        half = [seconds / 2 for seconds in found.backward]
        costs = {"F": found.forward, "B": found.backward, "I": half, "W": half}
        return Predicted(
            clock,
            tuple(np.array([costs[act.kind][act.stage] for act in acts]) for acts in clock.acts),
            tuple(np.array([act.kind == "F" for act in acts]) for acts in clock.acts),
            own / busy,
            {axis: phases[axis] / busy for axis in LAYER_AXES},
            self._collectives(job),
            max(0.0, own / own_even - 1.0) if own_even else 0.0,
            phases["pp"],
            phases["dp"],
            phases["optimizer"],
        )

    def _collectives(self, job: Job) -> dict[str, Floats]:
        found = [
            seconds_by_axis(job, self._hardware, pp, self._release) for pp in range(self._cluster.grid.pp)
        ]
        axes = {axis for one in found for axis in one}
        return {axis: np.array([one.get(axis, 0.0) for one in found]) for axis in axes}

    def step(self, predicted: Predicted, conditions: Conditions, heat: Floats) -> StepTimes:
        """The times of a step on all ranks. `heat` [rank]: 0 for a rank whose experts have the mean load, 1 for the
        most loaded rank, negative for a rank below the mean load."""
        cluster = self._cluster
        warm = np.maximum(0.05, (1.0 + predicted.heat * heat) / (1.0 + predicted.heat))
        own_factor = conditions.compute * warm
        slowest_own, slowest_net = cluster.slowest(own_factor), cluster.slowest(conditions.network)
        share = sum(predicted.exposed.values())
        factor = predicted.own * slowest_own + share * slowest_net  # [pp, block]
        durations = [cost[:, None] * factor[pp] for pp, cost in enumerate(predicted.costs)]
        ends = predicted.clock.ends(durations)
        first_block = [(end[:, 0], end[:, 0] - own[:, 0]) for end, own in zip(ends, durations, strict=True)]
        bare = np.max([end[-1] for end in ends], axis=0)  # [block]: the window without transfers
        busy = np.array([own.sum(0) for own in durations])  # [pp, block]
        piped = cluster.grid.pp > 1
        transfers = predicted.pp_s * slowest_net.max(0) if piped else 0.0
        window = bare + transfers
        reduce_s = predicted.dp_s * float(slowest_net.max())
        step_s = float(window.max()) + reduce_s + predicted.optimizer_s
        base = np.array([cost.sum() for cost in predicted.costs])
        forward = np.array(
            [own[which].sum(0) for own, which in zip(durations, predicted.forward, strict=True)]
        )
        of_ranks = cluster.of_ranks
        waits = (
            of_ranks(base[:, None] * predicted.own * slowest_own)
            - base[cluster.pp] * predicted.own * own_factor
        )
        exposed = {
            axis: of_ranks(base[:, None] * share * slowest_net) for axis, share in predicted.exposed.items()
        }
        if self._block_axis:
            exposed[self._block_axis] = exposed[self._block_axis] + waits
        windows = np.broadcast_to(window, busy.shape)
        idle = (bare - busy) / windows
        exposed["pp"] = of_ranks(windows - busy) if piped else np.zeros(cluster.world)
        exposed["dp"] = step_s - predicted.optimizer_s - of_ranks(windows)
        bound = np.broadcast_to(((bare - busy) / bare).mean(0), busy.shape)
        return StepTimes(
            step_s,
            of_ranks(forward),
            of_ranks(busy - forward),
            exposed["dp"],
            predicted.optimizer_s,
            exposed,
            {
                axis: np.maximum(exposed.get(axis, 0.0), of_ranks(seconds[:, None] * slowest_net))
                for axis, seconds in predicted.collectives.items()
            },
            of_ranks((windows - busy) / windows),
            of_ranks(idle),
            of_ranks(bound),
            of_ranks(windows),
            [end for end, _ in first_block],
            [start for _, start in first_block],
        )


def rounded(imbalance: float) -> float:
    """The imbalance, rounded to a multiple of `IMBALANCE_STEP`."""
    return max(1.0, round(imbalance / IMBALANCE_STEP) * IMBALANCE_STEP)


@lru_cache(maxsize=32)
def _schedule(name: str, ranks: int, virtual_stages: int, micro_batches: int) -> ScheduleClock:
    return ScheduleClock(name, ranks, virtual_stages, micro_batches)
