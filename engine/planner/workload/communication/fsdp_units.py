"""The FSDP units of a rank: which weights the engine gathers and reduces together."""

from math import ceil, prod

from engine.planner.workload.communication.compressed_gradients import Shape
from engine.planner.workload.job import Job
from engine.planner.workload.parameters import Shards
from engine.planner.workload.weights import Weight, end_weights, layer_weights


def replicated_units(job: Job, pp: int) -> list[list[Shape]]:
    """For each FSDP unit of a rank at pipeline coordinate `pp`, the padded shapes of the shards whose gradients the
    replicas sum.

    Each block, the experts of each block, the head, and the rest of a stage are separate units. With a pipeline and a
    ZeRO stage below 3, a pipeline stage is one unit and its experts are another (engine/sharding/fsdp.py).
    """
    shards, grid, ends = Shards.of(job), job.grid, end_weights(job.model)
    by_block = grid.pp == 1 or job.zero == 3
    units: dict[tuple[object, ...], list[Shape]] = {}

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
    return list(units.values())


def shards_whole(weight: Weight, shards: Shards) -> bool:
    """Whether every tp rank holds the whole weight. The engine does not divide shared experts over tp."""
    return weight.division == "whole" or (weight.part == "shared" and not shards.shared_over_tp)
