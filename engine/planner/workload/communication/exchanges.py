"""The collectives of a rank in a step, from which the time of a step, its communication roofline and the bytes that a
rank sends (`traffic.py`) are computed.

The collectives of tp, cp and ep are among the operations of the rank's stages. For dp, the ZeRO stage determines how
often weights are gathered and gradients are reduced (docs/evidence/bytes.md).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Literal, NamedTuple

from engine.planner.schedule import action_order
from engine.planner.workload.communication.compressed_gradients import messages
from engine.planner.workload.communication.fsdp_units import Unit, fsdp_units
from engine.planner.workload.end_work import embedding_work, head_work, prediction_work
from engine.planner.workload.job import Job
from engine.planner.workload.layer_work import COUNT, layer_work
from engine.planner.workload.operations import WIDTH, Collective, Kind, Operation, Work, sent_bytes
from engine.planner.workload.parameters import Shards, embedding_copied, layers_of_rank, stage_weights
from engine.planner.workload.recomputed import recomputed_work
from engine.planner.workload.transformer import Experts, Layer
from engine.planner.workload.weights import end_weights


@dataclass(frozen=True)
class Exchange:
    """A collective over `ranks` ranks that are `stride` apart. `bytes`: size of the buffer, as in `Collective`.
    `times`: how often the exchange runs in a step. `pieces`: number of separate collectives (one for
    each FSDP unit) that together move `bytes`. `copies`: for an all-to-all, how many copies of each token the buffer
    holds. `load`: as in `Collective`."""

    axis: str
    kind: Kind
    bytes: float
    ranks: int
    stride: int
    times: float = 1
    pieces: int = 1
    copies: int = 1
    load: float | None = None

    @property
    def sent(self) -> float:
        """Bytes that a rank sends to other ranks in a step; if tokens are sent to experts, the mean over the ranks."""
        return self.times * sent_bytes(self.kind, self.bytes / (self.load or 1), self.ranks)


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


def data_exchanges(job: Job, pp: int, gradient_bytes: float) -> DataExchanges:
    """The data-parallel collectives that a rank at pipeline coordinate `pp` runs in a step. With ZeRO 0, Megatron-LM's
    all-reduce of the gradients is listed as a reduce-scatter and an all-gather; weights are not gathered. The buffers
    have a shard for each rank, so they include the rows that FSDP2 adds as padding: 8 experts over 128 ranks are padded
    to 128."""
    grid, found = job.grid, DataExchanges([], [], [], [])
    if job.adapters:
        return found
    often, units = repeats(job, pp), fsdp_units(job, pp)
    whole = job.zero == 0 and job.framework == "megatron"
    width = gradient_bytes if whole else WIDTH[job.precision]
    dense, experts = (grid.fsdp, grid.tp), (job.efsdp, grid.ep * job.etp)
    groups: dict[tuple[tuple[int, int], bool], list[Unit]] = {}
    for unit in units:
        apart = unit.root and often.root != often.gathers
        groups.setdefault((experts if unit.experts else dense, apart), []).append(unit)
    for ((ranks, stride), apart), alike in groups.items():
        if ranks == 1:
            continue
        size, pieces = ranks * sum(unit.shard for unit in alike), len(alike)
        times = often.root if apart else often.gathers
        gathers, gathered = (found.root if apart else found.gathers), size * width
        gathers.append(Exchange("dp", "all_gather", gathered, ranks, stride, times, pieces))
        reduced = size * gradient_bytes
        found.reductions.append(
            Exchange("dp", "reduce_scatter", reduced, ranks, stride, often.reductions, pieces)
        )
    found.sums.extend(replica_sums(job, units, gradient_bytes))
    return found


def replica_sums(job: Job, units: Sequence[Unit], gradient_bytes: float) -> Iterator[Exchange]:
    """The collectives with which the replicas sum the gradients of FSDP units."""
    ranks, stride = job.grid.dp_replicate, job.grid.fsdp * job.grid.tp
    for unit in units if ranks > 1 else ():
        if job.compression.method == "none":
            yield Exchange("dp", "all_reduce", unit.shard * gradient_bytes, ranks, stride)
            continue
        for message in messages(job.compression, unit.shapes, ranks):
            yield Exchange("dp", message.kind, message.size, ranks, stride)


def sums_after_backward(job: Job, pp: int, fsdp: int, gradient_bytes: float) -> Iterator[Exchange]:
    """The small all-reduces at the end of a step: gradients of weights that every tp rank holds whole, gradients of the
    embedding's weight and of its copy on the last stage, and loads of the experts (docs/evidence/bytes.md)."""
    grid, shards = job.grid, Shards.of(job)
    replicated = sum(
        _own(job, shards.shape(weight), fsdp)
        for stage in job.stages_of(pp)
        for _, weight in stage_weights(job, stage)
        if shards.whole(weight)
    )
    yield Exchange("tp", "all_reduce", replicated * gradient_bytes, grid.tp, 1)
    if embedding_copied(job) and {0, job.stages - 1} & {*job.stages_of(pp)}:
        copied = _own(job, shards.shape(end_weights(job.model).embedding[0]), fsdp)
        yield Exchange("pp", "all_reduce", copied * gradient_bytes, 2, grid.world // grid.pp * (grid.pp - 1))
    if job.bias_balance:
        loads = sum(
            times * layer.mlp.experts * COUNT
            for layer, times in layers_of_rank(job, pp).items()
            if isinstance(layer.mlp, Experts)
        )
        yield Exchange("tp", "all_reduce", loads, grid.tp, 1)
        yield Exchange("dp", "all_reduce", loads, grid.fsdp, grid.tp)
        yield Exchange("dp", "all_reduce", loads, grid.dp_replicate, grid.tp * grid.fsdp)


def _own(job: Job, shape: tuple[int, ...], fsdp: int) -> int:
    """Number of a weight's elements whose gradients the rank at coordinate `fsdp` sums: those of its shard, without
    padding. Megatron-LM sums whole gradients."""
    if job.framework == "megatron":
        return prod(shape)
    rows = ceil(shape[0] / job.grid.fsdp)
    return min(rows, max(0, shape[0] - fsdp * rows)) * prod(shape[1:])


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


def rank_exchanges(job: Job, pp: int, gradient_bytes: float, fsdp: int = 0) -> list[Exchange]:
    """All collectives that a rank at the coordinates `pp` and `fsdp` runs in a step. The ranks at coordinate 0 of fsdp
    have the largest shards."""
    counts: Counter[Collective] = Counter()
    for stage in job.stages_of(pp):
        for part, work, times in parts(job, stage):
            for operation in (*work.forward, *work.backward, *again(job, part, work)):
                if isinstance(operation, Collective):
                    counts[operation] += times * job.micro_batches
    found = []
    for op, times in counts.items():
        copies = op.copies if job.deduplicated else 1
        found.append(Exchange(op.axis, op.kind, op.bytes, op.ranks, op.stride, times, 1, copies, op.load))
    if count := sends(job, pp):
        stride = job.grid.world // job.grid.pp
        found.append(Exchange("pp", "send", send_bytes(job), 2, stride, count * job.micro_batches))
    for group in data_exchanges(job, pp, gradient_bytes):
        found += group
    found += sums_after_backward(job, pp, fsdp, gradient_bytes)
    return [one for one in found if one.ranks > 1 and one.bytes]


def passes_of_rows(job: Job) -> int:
    """How many times the row of a (token, expert) pair travels to its expert and back in a step: in the forward and in
    the backward pass, and if the layer is recomputed, once more."""
    layer = next(layer for layer in job.model.kinds if isinstance(layer.mlp, Experts))
    work = layer_work(job, layer)
    forward, rest = (
        sum(isinstance(op, Collective) and op.load is not None for op in operations)
        for operations in (work.forward, (*work.backward, *again(job, layer, work)))
    )
    return 1 + rest // forward


def sends(job: Job, pp: int) -> int:
    """Number of tensors that a rank sends to other ranks of its pipeline for each micro-batch: activations forward, and
    gradients backward."""
    mine, last = job.stages_of(pp), job.stages - 1
    forth = sum(stage < last and stage + 1 not in mine for stage in mine)
    return forth + sum(stage > 0 and stage - 1 not in mine for stage in mine)
