"""Idle time of a pipeline: its ranks exchange the durations of their actions, and each rank computes why it was
idle."""

import torch
from torch import Tensor

from engine.metering.meter import Readings
from engine.parallel.collectives import AsyncCollective
from engine.parallel.mesh import World
from engine.planner.idle_time import Idle, split_idle
from engine.planner.schedule import ScheduleClock


class IdleTimes:
    """Exchanges the durations of pipeline actions between the ranks of a pipeline. `send` starts the exchange after the
    pipeline has run, and `split` completes the exchange."""

    def __init__(self, world: World):
        self._world = world
        # Durations of the actions in the step that `split` returned last, in seconds, by rank.
        self.durations: list[list[float]] | None = None
        self._exchange: tuple[AsyncCollective, list[Tensor], ScheduleClock, float] | None = None

    def send(self, readings: Readings, clock: ScheduleClock) -> None:
        """Send the durations of this rank's pipeline actions, and the time from the start of the pipeline to the end of
        its last action, to the other ranks of its pipeline."""
        world = self._world
        if world.pp.size == 1:
            return
        spans = readings.spans
        assert [(s.kind, s.stage, s.micro_batch) for s in spans] == clock.acts[world.pp.rank]
        mine = torch.zeros(1 + max(map(len, clock.acts)), dtype=torch.float64)
        mine[: 1 + len(spans)] = torch.tensor([readings.window, *(s.end - s.start for s in spans)])
        started, rows = world.control.start_exchange(mine, world.pp.peers)
        self._exchange = (started, rows, clock, readings.waited)

    def split(self) -> Idle | None:
        """Idle time of this rank, by cause, in the step whose durations were sent last. None if there is no pipeline,
        or if the GPUs have not finished that step."""
        self.durations = None
        if self._exchange is None:
            return None
        started, rows, clock, waited = self._exchange
        self._exchange = None
        started.wait()
        table = [row.tolist() for row in rows]
        if not any(row[0] for row in table):
            return None  # the GPUs have not finished the step, so no times are known
        durations = [row[1 : 1 + len(acts)] for row, acts in zip(table, clock.acts, strict=True)]
        self.durations = durations
        return split_idle(clock, self._world.pp.rank, durations, [row[0] for row in table], waited)
