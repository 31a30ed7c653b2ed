"""The conditions of a step: noise, and the events of a scenario, as factors on the times of each rank."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.simulate.cluster import Cluster
from engine.simulate.scenario import Lost, Network, Scenario, Straggler, Throttle


@dataclass(frozen=True)
class Conditions:
    """The condition of all ranks in one step. `compute` and `network` are factors on predicted times, [rank]."""

    compute: NDArray[np.float64]
    network: NDArray[np.float64]
    throttled: NDArray[np.bool_]
    silent: NDArray[np.bool_]
    outage_s: float | None  # how long the silent ranks stay silent; None: until the end of the run


class Machines:
    """Draws the conditions of each step; the same seed and step give the same conditions."""

    def __init__(self, cluster: Cluster, scenario: Scenario, seed: int):
        self._cluster, self._scenario, self._seed = cluster, scenario, seed
        spread = scenario.noise.device
        self._device = np.exp(spread * np.random.default_rng([seed, 0]).standard_normal(cluster.world))

    def at(self, step: int) -> Conditions:
        cluster, noise = self._cluster, self._scenario.noise
        rng = np.random.default_rng([self._seed, 1, step])
        compute = self._device * np.exp(noise.compute * rng.standard_normal(cluster.world))
        network = np.exp(noise.network * rng.standard_normal(cluster.world))
        throttled, silent = np.zeros((2, cluster.world), dtype=bool)
        outage_s: float | None = 0.0
        for event in self._scenario.events:
            if not event.in_force(step):
                continue
            match event:
                case Straggler(rank=rank, factor=factor):
                    compute[rank] *= factor
                case Throttle(node=node, factor=factor):
                    compute[cluster.node == node] *= factor
                    throttled |= cluster.node == node
                case Network(node=node, factor=factor):
                    network[cluster.node == node] *= factor
                case Lost(node=node, seconds=seconds) if step == event.step:
                    silent |= cluster.node == node
                    outage_s = None if seconds is None or outage_s is None else max(outage_s, seconds)
        return Conditions(compute, network, throttled, silent, outage_s)
