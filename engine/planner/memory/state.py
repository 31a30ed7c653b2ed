"""Bytes of parameters, gradients and optimizer state on one rank, under each ZeRO stage.

Mixed precision with Adam takes 16 bytes a parameter with bf16 gradients, 18 with fp32 ones: weights of the products 2,
gradients 2 or 4, fp32 weights 4, two moments 8 (ZeRO, arXiv 1910.02054, section 3.1). The ZeRO stage says what is
sharded over data parallelism: 1 the optimizer's state, 2 also gradients, 3 also weights (section 5). Megatron-LM's
distributed optimizer is stage 1: 6 + 12 / d bytes.

The engine (docs/architecture.md) keeps fp32 shards of its weights at every stage, and gathers them in the precision of
the products: below stage 3 for a whole step, at stage 3 for a unit's use.
"""

from typing import NamedTuple

from engine.planner.memory.sizes import FP32, STREAM
from engine.planner.workload.job import Job
from engine.planner.workload.parameters import Held, Shards, ends_held, layer_held
from engine.planner.workload.transformer import Attention

MOMENTS = {"adamw": 2, "sgd": 0}  # fp32 values of the optimizer per parameter

QUANTISED = {"fp8": 2.0, "nvfp4": 1.125}
"""Bytes per parameter of quantised copies of bf16 weights, in both orders that the products need."""

PREFETCHED = 2  # units that are gathered at once at stage 3: the one in use and the next


class State(NamedTuple):
    """Bytes. `gathered` whole weights in backward, of which `staying` are also there at the loss. `gradients` persist
    between micro-batches; `pending` is the reduction of the latest micro-batch, until the next one begins; `reduced` is
    what the reduction of one unit takes in backward."""

    parameters: float
    gathered: float
    staying: float
    gradients: float
    pending: float
    reduced: float
    optimizer: float


def state_of(job: Job, pp: int, held: Held, gloo: bool = False) -> State:
    """The state of a rank at pipeline coordinate `pp` that holds these parameters; `gloo`: with the buffers of the
    engine's collectives on CPUs."""
    return _engine(job, pp, held, gloo) if job.framework == "engine" else _megatron(job, pp, held)


def _megatron(job: Job, pp: int, held: Held) -> State:
    mixed = job.precision != "fp32"
    weight = STREAM[job.precision] + QUANTISED.get(job.precision, 0.0)
    gradient = FP32 if not mixed or job.gradients == "fp32" else 2
    update = FP32 * (MOMENTS[job.optimizer] + (job.master and mixed))
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
    optimizer = shards * MOMENTS[job.optimizer]
    if not is_sharded(job):
        return State(parameters, 0.0, 0.0, shards, 0.0, 0.0, optimizer)
    product, unit, root = STREAM[job.precision], largest_unit(job, pp), root_unit(job, pp)
    whole = held.whole * product
    gathered, staying = (whole, whole)
    if job.zero == 3:
        gathered, staying = min(whole, (root + PREFETCHED * unit) * product), root * product
    # Reduced once a step, gradients are whole until then, and summed in fp32.
    once_a_step = not reduces_each_micro_batch(job)
    gradients = (held.whole if once_a_step else held.shard) * FP32
    pending = shards if not once_a_step and job.micro_batches > 2 else 0.0
    if gloo and not once_a_step and job.micro_batches > 1:
        # A running reduce-scatter keeps the rows that it sends and those that it receives.
        sent = held.dense * (job.grid.fsdp > 1) + held.experts * (job.efsdp > 1)
        pending += 2 * sent * FP32
    return State(parameters, gathered, staying, gradients, pending, max(unit, root) * FP32, optimizer)


def _rotary_tables(job: Job, pp: int) -> float:
    """Each attention layer of the engine has its own table of cos and sin, [2, S, 1, C] in fp32."""
    layers = [job.model.layers[n] for stage in job.stages_of(pp) for n in job.parts[stage]]
    widths = sum(layer.mixer.head_dim for layer in layers if isinstance(layer.mixer, Attention))
    return 2 * FP32 * widths * job.seq_len / job.grid.cp


def is_sharded(job: Job) -> bool:
    """Whether the engine wraps its stages in FSDP: a rank alone, in fp32, does without."""
    grid = job.grid
    alone = grid.pp == grid.fsdp == job.efsdp == grid.dp_replicate == 1
    return not (alone and job.precision == "fp32")


def reduces_each_micro_batch(job: Job) -> bool:
    """Whether the engine reduces gradients after each micro-batch. Below stage 2, and with a pipeline, it does so once
    a step."""
    return job.framework == "engine" and is_sharded(job) and job.grid.pp == 1 and job.zero >= 2


def largest_unit(job: Job, pp: int) -> int:
    """Parameters of the largest unit that is gathered alone: a layer without its experts, its experts, or the head."""
    shards, layers = Shards.of(job), {job.model.layers[n] for s in job.stages_of(pp) for n in job.parts[s]}
    held = [layer_held(job.model, layer, shards) for layer in layers]
    return max((max(h.dense, h.experts) for h in held), default=0)


def root_unit(job: Job, pp: int) -> int:
    """Parameters outside the layers, which stay gathered: embedding, last norm, head."""
    stages = job.stages_of(pp)
    return ends_held(job, 0 in stages, job.stages - 1 in stages).whole
