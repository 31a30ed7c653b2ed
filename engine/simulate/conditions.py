"""The noise and the scenario events of a simulated step, as factors by which each rank's times are multiplied."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.simulate.cluster import Cluster
from engine.simulate.scenario import Hang, Lost, MemoryLeak, Network, Scenario, Slowdown, Straggler, Throttle

GiB = 1 << 30


@dataclass(frozen=True)
class Conditions:
    """What the noise and the events of the scenario do to each rank in one step. `compute` and `network` [rank]:
    factors by which the predicted times of computation and of communication are multiplied."""

    compute: NDArray[np.float64]
    network: NDArray[np.float64]
    throttled: NDArray[np.bool_]
    silent: NDArray[np.bool_]
    hung: NDArray[np.bool_]  # these ranks hang, and all others wait for them
    outage_s: float | None  # seconds for which ranks stay silent or hang; None: until the end of the run
    leaked_bytes: int  # of each device


class Machines:
    """Draws the noise of each step and applies the events of the scenario; the same seed and step give the same
    result."""

    def __init__(self, cluster: Cluster, scenario: Scenario, seed: int):
        self._cluster, self._scenario, self._seed = cluster, scenario, seed
        spread = scenario.noise.device
        self._device = np.exp(spread * np.random.default_rng([seed, 0]).standard_normal(cluster.world))

    def at(self, step: int) -> Conditions:
        cluster, noise = self._cluster, self._scenario.noise
        rng = np.random.default_rng([self._seed, 1, step])
        compute = self._device * np.exp(noise.compute * rng.standard_normal(cluster.world))
        network = np.exp(noise.network * rng.standard_normal(cluster.world))
        throttled, silent, hung = np.zeros((3, cluster.world), dtype=bool)
        outage_s: float | None = 0.0
        leaked = 0.0
        for event in self._scenario.events:
            if not event.in_force(step):
                continue
            match event:
                case Straggler(rank=rank, factor=factor):
                    compute[rank] *= factor
                case Slowdown(factor=factor):
                    compute *= factor
                case Throttle(node=node, factor=factor):
                    compute[cluster.node == node] *= factor
                    throttled |= cluster.node == node
                case Network(node=node, factor=factor):
                    network[slice(None) if node is None else cluster.node == node] *= factor
                case Lost(node=node, seconds=seconds) if step == event.step:
                    silent |= cluster.node == node
                    outage_s = None if seconds is None or outage_s is None else max(outage_s, seconds)
                case Hang(rank=rank, seconds=seconds) if step == event.step:
                    hung[rank] = True
                    outage_s = None if seconds is None or outage_s is None else max(outage_s, seconds)
                case MemoryLeak(gib=gib):
                    leaked += gib * GiB * (step - event.step + 1)
        return Conditions(compute, network, throttled, silent, hung, outage_s, int(leaked))
