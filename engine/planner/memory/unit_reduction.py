"""The reduction of a layer's larger FSDP unit, while a backward of the engine goes on: at ZeRO 2 and 3, without a
pipeline, after each micro-batch.

FSDP2 (torch 2.13, `foreach_reduce`) copies a unit's gradients into one fp32 buffer and reduces that into another, the
unit's shard. A rank that shards with no other copies it through a third. From the second micro-batch on, the sums of
the earlier ones exist beside these (`engine/sharding/fsdp_hooks.py`).
The experts of a layer are reduced before its attention; the layer without them at its end.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.planner.memory.saved import Kind, saved_of_layer
from engine.planner.memory.sizes import FP32, STREAM, Sizes
from engine.planner.memory.state import reduces_each_micro_batch
from engine.planner.workload.job import Job
from engine.planner.workload.parameters import Shards, layer_held
from engine.planner.workload.transformer import Layer


@dataclass(frozen=True)
class UnitReduction:
    """Bytes. `buffers`: whole gradients, their shard and the copy. `freed`: weights of the unit that are no longer
    gathered. `gone`: what the layer had saved and backward has used, by kind. `working`: recomputed tensors that are
    still there, and the gradient of the stream."""

    buffers: float
    freed: float
    gone: Mapping[Kind, float]
    working: float


def unit_reduction(job: Job, layer: Layer) -> UnitReduction | None:
    """The reduction of the larger unit of a layer; None if gradients are reduced once a step, or not at all."""
    if not reduces_each_micro_batch(job):
        return None
    held = layer_held(job.model, layer, Shards.of(job))
    experts = held.experts >= held.dense
    unit, ranks = (held.experts, job.efsdp) if experts else (held.dense, job.grid.fsdp)
    copies = 1 + 1 / ranks + (ranks == 1)
    # Gradients of a middle micro-batch stay unsummed until the next one, whose forward needs the weights: at stage 2
    # these stay gathered. Only the last backward frees them.
    stay = job.zero == 2 and job.micro_batches > 2
    kept = _by_kind(job, layer)
    sizes = Sizes.of(job)
    working = sizes.slice_tokens * job.model.d_model * sizes.stream
    if experts and job.recompute == "full":
        whole = _by_kind(replace(job, recompute="none"), layer)
        working += whole["attention"] + whole["mlp"]
    gone: Mapping[Kind, float] = {"moe": kept["moe"]} if experts else kept
    return UnitReduction(copies * unit * FP32, 0.0 if stay else unit * STREAM[job.precision], gone, working)


def _by_kind(job: Job, layer: Layer) -> dict[Kind, float]:
    total: dict[Kind, float] = defaultdict(float)
    for entry in saved_of_layer(job, layer):
        total[entry.kind] += entry.bytes
    return total
