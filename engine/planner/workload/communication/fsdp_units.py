"""The FSDP units of a rank: which weights the engine gathers together, and whose gradients it reduces together."""

from math import ceil, prod
from typing import NamedTuple

from engine.planner.workload.communication.compressed_gradients import Shape
from engine.planner.workload.job import Job
from engine.planner.workload.parameters import Shards
from engine.planner.workload.weights import Weight, end_weights, layer_weights


class Unit(NamedTuple):
    """An FSDP unit. `root`: whether it is the root unit of a stage, with the embedding and the last norm. `shapes`: the
    padded shapes of the parameters' shards on one rank."""

    experts: bool
    root: bool
    shapes: list[Shape]


def fsdp_units(job: Job, pp: int) -> list[Unit]:
    """The FSDP units of a rank at pipeline coordinate `pp`.

    Each block, the experts of each block, the head, and the rest of a stage are separate units. With a pipeline and a
    ZeRO stage below 3, the experts of a pipeline stage are one unit and the rest of the stage is another
    (engine/sharding/fsdp.py).
    """
    shards, grid, ends = Shards.of(job), job.grid, end_weights(job.model)
    by_block = grid.pp == 1 or job.zero == 3
    units: dict[tuple[int, object, bool], list[Shape]] = {}

    def add(weight: Weight, stage: int, block: object) -> None:
        experts = weight.division == "experts"
        ways = shards.efsdp if experts else shards.fsdp
        shape = weight.local_shape(1 if shards_whole(weight, shards) else grid.tp, grid.ep, job.etp)
        padded = (ceil(prod(shape) / ways),) if shards.flat else (ceil(shape[0] / ways), *shape[1:])
        units.setdefault((stage, block if by_block else None, experts), []).append(padded)

    for stage in job.stages_of(pp):
        for number in job.parts[stage]:
            for weight in layer_weights(job.model, job.model.layers[number]):
                add(weight, stage, number)
        if stage == 0:
            for weight in ends.embedding:
                add(weight, stage, None)
        if stage == job.stages - 1:
            for weight in ends.head:
                add(weight, stage, None if weight.part == "norm" else "head")
            if job.model.tied and stage:
                add(ends.embedding[0], stage, "head")
    return [
        Unit(experts, block is None and not experts, shapes) for (_, block, experts), shapes in units.items()
    ]


def shards_whole(weight: Weight, shards: Shards) -> bool:
    """Whether every tp rank holds the whole weight. The engine does not split shared experts over tp."""
    return weight.division == "whole" or (weight.part == "shared" and not shards.shared_over_tp)
