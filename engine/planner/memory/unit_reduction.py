"""Memory of a rank while FSDP reduces the gradients of the larger of a layer's FSDP units (its experts or its other
weights).

At ZeRO 2 and 3 without a pipeline, the engine reduces gradients in each backward pass.

FSDP2 (torch 2.13, `foreach_reduce`) copies a unit's gradients into an fp32 buffer and reduce-scatters it into a second
buffer, which holds the gradients of the rank's shard. From the second micro-batch on, the gradients summed over earlier
micro-batches also exist (`engine/sharding/fsdp_hooks.py`).

The gradients of a layer's experts are reduced before the backward pass of its attention. The gradients of the layer's
other weights are reduced at the end of its backward pass.
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
    """Memory in bytes while the gradients of an FSDP unit are reduced. `buffers`: the two buffers for reducing the
    gradients. `freed`: the part of the unit's gathered weights that has already been freed. `gone`: the saved tensors
    of the layer that the backward pass has already freed, by category (`saved.Kind`). `working`: recomputed tensors
    that still exist, and the gradient of the residual stream."""

    buffers: float
    freed: float
    gone: Mapping[Kind, float]
    working: float


def unit_reduction(job: Job, layer: Layer) -> UnitReduction | None:
    """The gradient reduction of one of a layer's two FSDP units (its experts and its other weights), whichever is
    larger; None if gradients are reduced once per step, or not at all."""
    if not reduces_each_micro_batch(job):
        return None
    held = layer_held(job.model, layer, Shards.of(job))
    experts = held.experts >= held.dense
    unit, ranks = (held.experts, job.efsdp) if experts else (held.dense, job.grid.fsdp)
    copies = 1 + 1 / ranks
    # At stage 2, weights stay gathered for the forward pass of the next micro-batch. Only the last backward pass frees
    # these weights.
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
