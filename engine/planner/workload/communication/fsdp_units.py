"""The FSDP units of a rank: which weights the engine gathers together, and whose gradients it reduces together."""

from math import prod
from typing import NamedTuple

from engine.planner.workload.communication.compressed_gradients import Shape
from engine.planner.workload.job import Job
from engine.planner.workload.parameters import Shards, stage_weights


class Unit(NamedTuple):
    """An FSDP unit. `root`: whether it is the root unit of a stage, with the embedding, the last norm, and the weights
    of multi-token prediction outside its layers. `shapes`: the padded shapes of the parameters' shards on one rank."""

    experts: bool
    root: bool
    shapes: list[Shape]

    @property
    def shard(self) -> int:
        """Number of elements of the unit's shard on one rank, with padding."""
        return sum(map(prod, self.shapes))


def fsdp_units(job: Job, pp: int) -> list[Unit]:
    """The FSDP units of a rank at pipeline coordinate `pp`.

    Each block, the experts of each block, the head, and the rest of a stage are separate units. With a pipeline and a
    ZeRO stage below 3, the experts of a pipeline stage are one unit and the rest of the stage is another
    (engine/sharding/fsdp.py).
    """
    shards, by_block = Shards.of(job), job.grid.pp == 1 or job.zero == 3
    units: dict[tuple[int, object, bool], list[Shape]] = {}
    for stage in job.stages_of(pp):
        for part, weight in stage_weights(job, stage):
            key = stage, part if by_block else None, weight.division == "experts"
            units.setdefault(key, []).append(shards.shard(weight))
    return [
        Unit(experts, part is None and not experts, shapes) for (_, part, experts), shapes in units.items()
    ]
