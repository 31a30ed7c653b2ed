"""The ranks of a pipeline tell each other how long their actions took, so that each can say why it idled."""

import torch
from torch import Tensor

from engine.metering.meter import Readings
from engine.parallel.collectives import AsyncCollective
from engine.parallel.mesh import World
from engine.planner.idle_time import Idle, split_idle
from engine.planner.schedule import ScheduleClock


class IdleTimes:
    """`tell` at the end of a step's pipeline, without waiting; `split` when the step is over."""

    def __init__(self, world: World):
        self._world = world
        self.durations: list[list[float]] | None = None  # seconds, of the step split last: rank by rank
        self._told: tuple[AsyncCollective, list[Tensor], ScheduleClock, float] | None = None

    def tell(self, readings: Readings, clock: ScheduleClock) -> None:
        """Send this rank's own window and the times of its actions to the other ranks of its pipeline."""
        world = self._world
        if world.pp.size == 1:
            return
        spans = readings.spans
        assert [(s.kind, s.stage, s.micro_batch) for s in spans] == clock.acts[world.pp.rank]
        mine = torch.zeros(1 + max(map(len, clock.acts)), dtype=torch.float64)
        mine[: 1 + len(spans)] = torch.tensor([readings.window, *(s.end - s.start for s in spans)])
        started, rows = world.control.start_exchange(mine, world.pp.peers)
        self._told = (started, rows, clock, readings.waited)

    def split(self) -> Idle | None:
        """Why this rank idled in the step told last; None without a pipeline, or without its times."""
        self.durations = None
        if self._told is None:
            return None
        started, rows, clock, waited = self._told
        self._told = None
        started.wait()
        table = [row.tolist() for row in rows]
        if not any(row[0] for row in table):
            return None  # a device so far behind that it could not tell yet
        durations = [row[1 : 1 + len(acts)] for row, acts in zip(table, clock.acts, strict=True)]
        self.durations = durations
        return split_idle(clock, self._world.pp.rank, durations, [row[0] for row in table], waited)
