"""The collectives of a rank in a step, from which both the time of a step and its communication roofline are computed.

The collectives of tp, cp and ep are among the operations of the rank's stages. For dp, the ZeRO stage determines how
often weights are gathered and gradients are reduced (docs/evidence/bytes.md).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from engine.planner.schedule import action_order
from engine.planner.workload.communication.compressed_gradients import messages
from engine.planner.workload.communication.fsdp_units import fsdp_units
from engine.planner.workload.end_work import embedding_work, head_work, prediction_work
from engine.planner.workload.job import Job
from engine.planner.workload.layer_work import layer_work
from engine.planner.workload.operations import WIDTH, Collective, Kind, Operation, Work
from engine.planner.workload.parameters import Held, ends_held, rank_parameters
from engine.planner.workload.recomputed import recomputed_work
from engine.planner.workload.transformer import Layer


@dataclass(frozen=True)
class Exchange:
    """A collective over `ranks` ranks that are `stride` apart. `bytes`: size of the buffer, as in `Collective`.
    `times`: how often the exchange runs in a step. `pieces`: number of separate collectives (one for
    each FSDP unit) that together move `bytes`. `copies`: for an all-to-all, how many copies of each token the buffer
    holds."""

    axis: str
    kind: Kind
    bytes: float
    ranks: int
    stride: int
    times: float = 1
    pieces: int = 1
    copies: int = 1


class Repeats(NamedTuple):
    """How often in a step a rank gathers each layer's weights (`gathers`), gathers the embedding (`root`) and reduces
    each gradient (`reductions`)."""

    gathers: int
    root: int
    reductions: int


def stays_gathered(job: Job) -> bool:
    """Whether weights stay gathered after a backward pass, and gradients stay unsharded until the end of the step.
    With a pipeline, the engine keeps weights gathered and gradients unsharded even at ZeRO 3. At ZeRO 3, Megatron-LM
    instead frees gathered weights and reduces gradients in each micro-batch."""
    return job.grid.pp > 1 and (job.framework == "engine" or job.zero < 3)


def repeats(job: Job, pp: int) -> Repeats:
    """How often pipeline rank `pp` gathers weights and reduces gradients in a step (docs/evidence/bytes.md, "dp, per
    step"). At ZeRO 3, weights are gathered before each forward and each backward pass; if `stays_gathered`, a pass that
    follows a backward pass does not gather them again. All stages of a rank are assumed to gather their weights as
    often as the rank's first stage does. The embedding stays gathered from the first operation of a micro-batch to the
    last; with a pipeline, from the first operation of a step to the last."""
    m, whole = job.micro_batches, stays_gathered(job)
    reductions = m if job.zero >= 2 and not whole else 1
    if job.zero < 3:
        return Repeats(1, 1, reductions)
    if not whole:
        return Repeats(2 * m, m, reductions)
    turns = action_order(job.schedule, pp, job.grid.pp, job.virtual_stages, m)
    first = job.stages_of(pp)[0]
    kinds = [act.kind for turn in turns for act in turn if act.stage == first]
    return Repeats(sum(before != "B" for before in ["", *kinds[:-1]]), 1, reductions)


class DataExchanges(NamedTuple):
    """The collectives of data parallelism. `sums`: exchanges that sum gradient shards over the replicas. `root`:
    gathers of the embedding, which are listed separately if the embedding is gathered less often than the layers."""

    reductions: list[Exchange]
    sums: list[Exchange]
    gathers: list[Exchange]
    root: list[Exchange]


def data_exchanges(job: Job, pp: int, held: Held, gradient_bytes: float) -> DataExchanges:
    """The data-parallel collectives that a rank at pipeline coordinate `pp` runs in a step. `held`: the rank's
    parameter counts. With ZeRO 0, the all-reduce of the gradients is listed as a reduce-scatter and an all-gather;
    weights are not gathered. The buffers have a shard for each rank, so they include the rows that FSDP2 adds as
    padding: 8 experts over 128 ranks are padded to 128."""
    grid, found = job.grid, DataExchanges([], [], [], [])
    if job.adapters:
        return found
    often, mine = repeats(job, pp), job.stages_of(pp)
    units = sum(len(job.parts[stage]) for stage in mine) + 2
    width = gradient_bytes if job.zero == 0 else WIDTH[job.precision]
    embedding = ends_held(job, True, False).dense_shard if job.zero == 3 and 0 in mine else 0
    for shard, root, ranks, stride in (
        (held.dense_shard, embedding, grid.fsdp, grid.tp),
        (held.experts_shard, 0, job.efsdp, grid.ep * job.etp),
    ):
        if not shard:
            continue
        if ranks > 1:
            sizes: tuple[tuple[list[Exchange], Kind, float, int, int], ...] = (
                (found.reductions, "reduce_scatter", shard * gradient_bytes, often.reductions, units),
                (found.gathers, "all_gather", (shard - root) * width, often.gathers, units),
                (found.root, "all_gather", root * width, often.root, 1),
            )
            for group, kind, size, times, pieces in sizes:
                if size:
                    group.append(Exchange("dp", kind, size * ranks, ranks, stride, times, pieces))
        if grid.dp_replicate > 1 and job.compression.method == "none":
            found.sums.append(
                Exchange(
                    "dp", "all_reduce", shard * gradient_bytes, grid.dp_replicate, stride * ranks, 1, units
                )
            )
    found.sums.extend(compressed_sums(job, pp))
    return found


def compressed_sums(job: Job, pp: int) -> list[Exchange]:
    """The collectives with which replicas sum compressed gradients; an empty list if gradients are not compressed."""
    ranks = job.grid.dp_replicate
    if ranks == 1 or job.compression.method == "none":
        return []
    stride = job.grid.fsdp * job.grid.tp
    return [
        Exchange("dp", message.kind, message.size, ranks, stride)
        for unit in fsdp_units(job, pp)
        for message in messages(job.compression, unit.shapes, ranks)
    ]


def strides(job: Job) -> dict[str, int]:
    """Stride between neighbouring ranks of a group, for each axis over which a layer communicates."""
    return {"tp": 1, "cp": job.grid.tp, "etp": 1, "ep": job.etp}


def send_bytes(job: Job) -> float:
    """Bytes that a tp rank sends to the next pipeline stage for each micro-batch. Each tp rank sends only its part of
    the activations, even without sequence parallelism (arXiv 2104.04473, section 4.1)."""
    tokens = job.micro_batch * job.seq_len / job.grid.cp / job.grid.tp
    return tokens * job.model.d_model * WIDTH[job.precision]


Part = Literal["embedding", "head", "mtp"] | Layer  # part of a stage


def parts(job: Job, stage: int) -> Iterator[tuple[Part, Work, int]]:
    """For each distinct part of a pipeline stage (a kind of layer, the embedding, the head, or the start of a
    multi-token prediction layer): the part, its operations for one micro-batch, and the number of times that it occurs
    in the stage."""
    for layer, times in Counter(job.model.layers[n] for n in job.parts[stage]).items():
        yield layer, layer_work(job, layer), times
    if stage == 0:
        yield "embedding", embedding_work(job), 1
    if stage == job.stages - 1:
        yield "head", head_work(job), 1 + job.model.mtp_layers
        if job.model.mtp_layers:
            layer = job.model.layers[-1]
            yield layer, layer_work(job, layer), job.model.mtp_layers
            yield "mtp", prediction_work(job), job.model.mtp_layers


def again(job: Job, part: Part, work: Work) -> tuple[Operation, ...]:
    """The forward operations that the backward pass recomputes; none for the embedding and the head."""
    if isinstance(part, str):
        return ()
    repeated = {"none": (), "selective": work.core, "full": work.again}[job.recompute]
    return (*repeated, *recomputed_work(job, part))


def rank_exchanges(job: Job, pp: int, gradient_bytes: float) -> list[Exchange]:
    """All collectives that a rank at pipeline coordinate `pp` runs in a step."""
    counts: Counter[Collective] = Counter()
    for stage in job.stages_of(pp):
        for part, work, times in parts(job, stage):
            for operation in (*work.forward, *work.backward, *again(job, part, work)):
                if isinstance(operation, Collective):
                    counts[operation] += times * job.micro_batches
    apart = strides(job)
    found = []
    for op, times in counts.items():
        axis, copies = "ep" if op.axis == "etp" else op.axis, op.copies if job.deduplicated else 1
        found.append(Exchange(axis, op.kind, op.bytes, op.ranks, apart[op.axis], times, 1, copies))
    if count := sends(job, pp):
        stride = job.grid.world // job.grid.pp
        found.append(Exchange("pp", "send", send_bytes(job), 2, stride, count * job.micro_batches))
    for group in data_exchanges(job, pp, rank_parameters(job, pp), gradient_bytes):
        found += group
    return found


def sends(job: Job, pp: int) -> int:
    """Number of tensors that a rank sends to other ranks of its pipeline for each micro-batch: activations forward, and
    gradients backward."""
    mine, last = job.stages_of(pp), job.stages - 1
    forth = sum(stage < last and stage + 1 not in mine for stage in mine)
    return forth + sum(stage > 0 and stage - 1 not in mine for stage in mine)
