"""Bytes of parameters, gradients and optimizer state on one rank, under each ZeRO stage.

Mixed precision with Adam takes 16 bytes per parameter with bf16 gradients and 18 with fp32 gradients: 2 for the weights
of the matmuls, 2 or 4 for gradients, 4 for fp32 weights, and 8 for two moments (ZeRO, arXiv 1910.02054, section 3.1).
ZeRO shards the optimizer state over data-parallel ranks from stage 1 on, the gradients from stage 2 on, and the weights
at stage 3 (section 5 of that paper). Megatron-LM's distributed optimizer corresponds to stage 1 and takes 6 + 12 / d
bytes per parameter over d ranks.

The engine (docs/architecture.md) keeps fp32 shards of its weights at every ZeRO stage, and gathers the weights in the
precision of the matmuls. Below stage 3, the gathered weights stay in memory for a whole step; at stage 3, only while
their FSDP unit runs.
"""

from itertools import pairwise
from typing import NamedTuple

from engine.planner.memory.sizes import FP32, STREAM
from engine.planner.workload.communication.compressed_gradients import held_copies
from engine.planner.workload.communication.fsdp_units import fsdp_units
from engine.planner.workload.job import Job
from engine.planner.workload.parameters import (
    Held,
    Shards,
    layer_held,
    layers_of_rank,
    rank_parameters,
    root_held,
    stage_layers,
)
from engine.planner.workload.transformer import Attention, LatentAttention

MOMENTS = {"adamw": 2, "sgd": 0}  # number of fp32 moments per parameter

QUANTISED = {"fp8": 2.0, "nvfp4": 1.125}
"""Bytes per parameter of quantised copies of bf16 weights, in both orders that the matmuls need."""

PREFETCHED = (
    2  # number of layers that Megatron-LM gathers at the same time at stage 3: the one in use and the next
)


class State(NamedTuple):
    """Bytes of parameters, gradients and optimizer state on one rank. `gathered`: weights that are gathered during the
    backward pass. `staying`: weights that are still gathered while the loss is computed. `gradients`: gradients that
    are kept from one micro-batch to the next. `pending`: in a run on CPUs, the buffers of the gradient reductions in
    progress. `reduced`: buffers in which one FSDP unit's gradients are reduced in the backward pass. `summed`: what
    compressed sums over the replicas hold, and `residuals`: what they leave behind, until the weights are updated."""

    parameters: float
    gathered: float
    staying: float
    gradients: float
    pending: float
    reduced: float
    optimizer: float
    summed: float = 0.0
    residuals: float = 0.0


def state_of(job: Job, pp: int, held: Held, gloo: bool = False) -> State:
    """The bytes of parameters, gradients and optimizer state on a rank that has pipeline coordinate `pp` and holds the
    parameters `held`. `gloo`: include the buffers of the engine's collectives on CPUs."""
    return _engine(job, pp, held, gloo) if job.framework == "engine" else _megatron(job, pp, held)


def _megatron(job: Job, pp: int, held: Held) -> State:
    mixed = job.precision != "fp32"
    weight = STREAM[job.precision] + QUANTISED.get(job.precision, 0.0)
    gradient = FP32 if not mixed or job.gradients == "fp32" else 2
    update = FP32 * (MOMENTS[job.optimizer] + (job.master and mixed) + job.averaged)
    unit = largest_unit(job, pp)
    gathered = PREFETCHED * unit * weight if job.zero == 3 else 0.0
    return State(
        (held.shard if job.zero == 3 else held.whole) * weight,
        gathered,
        gathered,
        (held.shard if job.zero >= 2 else held.whole) * gradient,
        0.0,
        unit * gradient if job.zero >= 2 else 0.0,
        (held.shard if job.zero >= 1 else held.whole) * update,
    )


def _engine(job: Job, pp: int, held: Held, gloo: bool) -> State:
    shards = held.shard * FP32
    parameters = shards + _rotary_tables(job, pp)
    optimizer = shards * (MOMENTS[job.optimizer] + job.averaged)
    compressed = job.grid.dp_replicate > 1 and job.compression.method != "none"
    if compressed:
        optimizer += shards  # residuals
    if not is_sharded(job):
        return State(parameters, 0.0, 0.0, shards, 0.0, 0.0, optimizer)
    product, unit, root = STREAM[job.precision], largest_unit(job, pp), root_unit(job, pp)
    whole = held.whole * product
    gathered, staying = (whole, whole)
    if job.zero == 3:
        gathered, staying = min(whole, (root + gathered_at_once(job, pp)) * product), root * product
    # If gradients are reduced once a step, a rank keeps whole fp32 gradients until then.
    once_a_step = not reduces_each_micro_batch(job)
    gradients = (held.whole if once_a_step else held.shard) * FP32
    pending = 0.0
    if gloo and not once_a_step and max(job.grid.fsdp, job.efsdp) > 1:
        # Two reduce-scatters run at a time, and each has buffers for the rows that it sends and those that it receives.
        pending = 2 * reduced_at_once(job, pp) * FP32
    summed = 0.0
    if compressed:
        waiting, peak = held_copies(job.compression, job.grid.dp_replicate)
        units = [unit.shard for unit in fsdp_units(job, pp)]
        # On CPUs, the sum of another unit waits at the same time. One copy of a finished sum is its residual.
        copies = peak - 1 + (waiting if gloo and len(units) > 1 else 0.0)
        summed = copies * max(units) * FP32
    residuals = shards if compressed else 0.0
    reduced = max(unit, root) * FP32
    return State(parameters, gathered, staying, gradients, pending, reduced, optimizer, summed, residuals)


def saved_state(job: Job, pp: int) -> float:
    """Bytes that a rank of the engine writes to a checkpoint: weights, optimizer state and the error-feedback residuals
    of gradient compression, all in fp32. The rank keeps a copy of these bytes in host memory."""
    state = state_of(job, pp, rank_parameters(job, pp))
    return state.parameters - _rotary_tables(job, pp) + state.optimizer


def _rotary_tables(job: Job, pp: int) -> float:
    """Bytes of rotary tables. Each attention layer of the engine has an fp32 table of cosines and sines, [2, S, 1, C],
    where C is the number of rotated dimensions."""
    widths = 0
    for layer, times in layers_of_rank(job, pp).items():
        match layer.mixer:
            case Attention(head_dim=width) | LatentAttention(rope_dim=width):
                widths += times * width
    rows = job.seq_len if job.documents == "reset" else job.seq_len / job.grid.cp
    return 2 * FP32 * widths * rows


def is_sharded(job: Job) -> bool:
    """Whether the engine wraps the stages in FSDP: always, except in an fp32 run that has one pipeline rank and one
    replica and shards neither dense parameters nor experts."""
    grid = job.grid
    alone = grid.pp == grid.fsdp == job.efsdp == grid.dp_replicate == 1
    return not (alone and job.precision == "fp32")


def reduces_each_micro_batch(job: Job) -> bool:
    """Whether the engine reduces gradients after each micro-batch. Below ZeRO stage 2, or with a pipeline, the engine
    reduces gradients once per step."""
    return job.framework == "engine" and is_sharded(job) and job.grid.pp == 1 and job.zero >= 2


def largest_unit(job: Job, pp: int) -> int:
    """Number of parameters in the largest FSDP unit of the layers. A unit is either the experts of a layer or the rest
    of the layer."""
    shards = Shards.of(job)
    held = [layer_held(job.model, layer, shards) for layer in layers_of_rank(job, pp)]
    return max((max(h.dense, h.experts) for h in held), default=0)


def gathered_at_once(job: Job, pp: int) -> int:
    """Number of parameters that the engine gathers at the same time at ZeRO stage 3: those of a layer with its experts,
    and those of the next layer without its experts, which are gathered when that layer begins."""
    held = _held_by_layers(job, pp)
    return max(
        (one.whole + after.dense for one, after in zip(held, [*held[1:], Held()], strict=True)), default=0
    )


def reduced_at_once(job: Job, pp: int) -> int:
    """Number of parameters in two FSDP units that follow each other in the backward pass: the experts of a layer and
    the rest of the layer are separate units."""
    units = [unit for one in _held_by_layers(job, pp) for unit in (one.dense, one.experts) if unit]
    return max(map(sum, pairwise([0, *units])), default=0)


def _held_by_layers(job: Job, pp: int) -> list[Held]:
    shards, stages = Shards.of(job), job.stages_of(pp)
    layers = (layer for stage in stages for layer in stage_layers(job, stage).values())
    return [layer_held(job.model, layer, shards) for layer in layers]


def root_unit(job: Job, pp: int) -> int:
    """Parameters outside the layers (embedding, last norm, head), which stay gathered from the forward pass to the
    backward pass."""
    return root_held(job, pp).whole
