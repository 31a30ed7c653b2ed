"""The peak memory of a rank, and the point in the step at which it occurs.

The peak is the maximum over these points, for each count of micro-batches in flight that the schedule reaches:

- the computation of a micro-batch's loss, during which a chunk of the logits also exists in fp32;
- the backward pass of a layer, during which recomputed activations and gradients of activations exist;
- the gradient reduction of a layer's larger FSDP unit (`unit_reduction.py`);
- the backward pass of the first layer, which runs last, if the gradients of the other layers or the buffers for
reducing them have been allocated since the backward pass began;
- the first and the last sums of compressed gradients over the replicas.

Activations are counted tensor by tensor (`saved.py`, `saved_megatron.py`).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields

from engine.planner.memory import saved, saved_megatron
from engine.planner.memory.in_flight import Counts, counts_in_flight
from engine.planner.memory.saved import Kind, Saved, saved_of_documents
from engine.planner.memory.sizes import Sizes
from engine.planner.memory.state import State, saved_state, state_of
from engine.planner.memory.unit_reduction import UnitReduction, unit_reduction
from engine.planner.memory.working import layer_working, loss_working
from engine.planner.workload.job import Job
from engine.planner.workload.parameters import rank_parameters
from engine.planner.workload.transformer import Layer

KINDS: tuple[Kind, ...] = ("attention", "mlp", "input", "moe")
LISTS = {"engine": saved, "megatron": saved_megatron}


@dataclass(frozen=True)
class RankMemory:
    """Memory of one pipeline rank at its peak, in bytes by component.

    `parameters`: weights and rotary tables. `gathered`: the full weights that ZeRO or FSDP gathers, and the buffers for
    reducing a unit's gradients. `activations`: layer inputs and the tensors that attention and dense MLPs keep for the
    backward pass, for all micro-batches in flight. `moe`: the tensors that routing and the routed experts keep for the
    backward pass, on the busiest ep rank. `logits`: tensors of the head and the loss. `working`: tensors that exist
    only during the backward pass of a layer. `pipeline`: buffers for the tensors sent between pipeline stages.
    `framework`: contexts, communication buffers and workspaces on a GPU. `checkpoint`: on a CPU, the copy from which
    checkpoints are written.
    """

    parameters: float
    gathered: float
    gradients: float
    optimizer: float
    activations: float
    moe: float
    logits: float
    working: float
    pipeline: float
    framework: float
    checkpoint: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.components().values())

    def components(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def largest(self) -> str:
        """The name of the largest component."""
        parts = self.components()
        return max(parts, key=lambda name: parts[name])


class LayerBytes:
    """Memory of each kind of layer in a job, in bytes, computed once and reused for all pipeline ranks."""

    def __init__(self, job: Job):
        self.job = job
        self._kept: dict[Layer, dict[str, float]] = {}
        self._working: dict[Layer, float] = {}
        self._reductions: dict[Layer, UnitReduction | None] = {}

    def kept(self, layer: Layer) -> dict[str, float]:
        """Bytes of the tensors that a layer keeps for the backward pass of a micro-batch, by category
        (`saved.Kind`)."""
        if layer not in self._kept:
            self._kept[layer] = _by_kind(LISTS[self.job.framework].saved_of_layer(self.job, layer))
        return self._kept[layer]

    def working(self, layer: Layer) -> float:
        """Bytes that the backward pass of the layer needs in addition to the tensors that the forward pass has kept for
        it."""
        if layer not in self._working:
            self._working[layer] = layer_working(self.job, layer)
        return self._working[layer]

    def reduction(self, layer: Layer) -> UnitReduction | None:
        """The gradient reduction of the layer's larger FSDP unit; None if gradients are not reduced after each
        micro-batch."""
        if layer not in self._reductions:
            self._reductions[layer] = unit_reduction(self.job, layer)
        return self._reductions[layer]


def peak_of_rank(layers: LayerBytes, pp: int, framework: float, gloo: bool) -> tuple[RankMemory, Counts]:
    """The memory of a rank at its peak, and the micro-batches in flight on each of its stages at that point."""
    job = layers.job
    stages = sorted(job.stages_of(pp))
    kept = [saved_of_stage(layers, stage, masked=gloo) for stage in stages]
    state = state_of(job, pp, rank_parameters(job, pp), gloo)
    copy = saved_state(job, pp) if gloo and job.saves and job.framework == "engine" else 0.0
    reached = counts_in_flight(job.schedule, pp, job.grid.pp, job.virtual_stages, job.micro_batches)
    moments = (
        (memory, counts)
        for counts in reached
        for memory in _moments(layers, stages, state, kept, counts, framework, copy)
    )
    return max(moments, key=lambda moment: moment[0].total)


def saved_of_stage(layers: LayerBytes, stage: int, masked: bool = False) -> dict[str, float]:
    """Bytes of the tensors that a stage keeps for the backward pass of a micro-batch, by category (`saved.Kind`).
    `masked`: whether attention within documents uses masks, which is the case on CPUs."""
    job = layers.job
    lists, model = LISTS[job.framework], job.model
    parts: list[tuple[dict[str, float], int]] = []
    if masked:
        parts.append((_by_kind(saved_of_documents(job)), 1))
    if stage == 0:
        parts.append((_by_kind(lists.saved_of_embedding(job)), 1))
    for layer, times in Counter(model.layers[n] for n in job.parts[stage]).items():
        parts.append((layers.kept(layer), times))
    if stage == job.stages - 1:
        # Each prediction of a further token (MTP) joins state and embedding, then runs a layer and the head.
        parts.append((_by_kind(lists.saved_of_head(job)), 1 + model.mtp_layers))
        parts.append((layers.kept(model.layers[-1]), model.mtp_layers))
        parts.append((_by_kind(lists.saved_of_prediction(job)), model.mtp_layers))
    total: dict[str, float] = defaultdict(float)
    for part, times in parts:
        for kind, size in part.items():
            total[kind] += times * size
    return total


def _by_kind(entries: Iterable[Saved]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for entry in entries:
        total[entry.kind] += entry.bytes
    return total


def _moments(
    layers: LayerBytes,
    stages: list[int],
    state: State,
    kept: list[dict[str, float]],
    counts: Counts,
    framework: float,
    copy: float,
) -> Iterator[RankMemory]:
    job = layers.job
    by_kind: dict[str, float] = defaultdict(float)
    for stage, times in zip(kept, counts, strict=True):
        for kind, size in stage.items():
            by_kind[kind] += size * times
    head = job.stages - 1 in stages
    own = {job.model.layers[n] for stage in stages for n in job.parts[stage]}
    working = max(map(layers.working, own), default=0.0)
    pipeline, held_logits = between_stages(job, stages, counts)

    def memory(
        logits: float,
        working: float,
        gathered: float,
        gradients: float,
        share: float = 1.0,
        gone: Mapping[Kind, float] = {},
    ) -> RankMemory:
        left = {kind: share * by_kind[kind] - gone.get(kind, 0.0) for kind in KINDS}
        return RankMemory(
            parameters=state.parameters,
            gathered=gathered,
            gradients=gradients,
            optimizer=state.optimizer,
            activations=left["attention"] + left["mlp"] + left["input"],
            moe=left["moe"],
            logits=logits,
            working=working,
            pipeline=pipeline,
            framework=framework,
            checkpoint=copy,
        )

    logits = by_kind["logits"] + held_logits
    once = job.grid.pp == 1 and job.micro_batches == 1  # no gradients before the first backward pass
    before = 0.0 if once else state.gradients
    if head:
        running = 0.0 if once else state.pending  # reductions of the previous micro-batch
        yield memory(logits + loss_working(job), 0.0, state.staying, before + running)
    # Backward of the last layer. If the rank has one stage, one micro-batch no longer keeps the head's tensors.
    of_head = sum(entry.bytes for entry in LISTS[job.framework].saved_of_head(job))
    released = of_head * (1 + job.model.mtp_layers) if head else 0.0
    kept_logits = max(0.0, logits - released) if len(stages) == 1 else logits
    yield memory(kept_logits, working, state.gathered + (0.0 if once else state.reduced), before)
    last = 1 / max(1, sum(len(job.parts[stage]) for stage in stages))  # the last layer's share of the layers
    # Reductions of the last layer run at the same time as the backward pass of the layer before.
    if state.pending:
        yield memory(kept_logits, working, state.gathered + state.reduced, before + state.pending, 1 - last)
    for unit in filter(None, map(layers.reduction, own)):
        yield memory(
            kept_logits,
            unit.working,
            max(0.0, state.gathered - unit.freed) + unit.buffers,
            before,
            gone=unit.gone,
        )
    if state.summed:
        # The first sums over the replicas run after the backward pass of the last layer, the last ones at the end.
        sums = state.gathered + state.reduced + state.summed
        yield memory(kept_logits, working, sums, before + last * state.residuals, 1 - last)
        yield memory(0.0, 0.0, state.reduced + state.summed, state.gradients + state.residuals, 0.0)
    if once:  # backward pass of the first layer: the other layers have gradients but no gathered weights
        rest = 1 / len(job.model.layers)
        gradients = state.gradients * (1 - rest) + state.pending
        yield memory(0.0, working, state.gathered * rest + state.reduced, gradients, rest)
    elif state.pending:
        rest = 1 / len(job.model.layers)
        yield memory(0.0, working, state.gathered + state.reduced, before + state.pending, rest)


def between_stages(job: Job, stages: list[int], counts: Counts) -> tuple[float, float]:
    """Two sizes in bytes: that of the buffers between pipeline stages, and that of the logits that are kept for the
    backward pass.

    The engine uses torch's pipelining, which allocates two receive buffers for each micro-batch before the step: one
    for activations and one for gradients. torch also keeps the output of each micro-batch in flight. With recompute,
    the receive buffer itself is the saved input of the first layer, so this input is not counted twice. Megatron-LM
    frees outputs after sending.
    """
    if job.grid.pp == 1:
        return 0.0, 0.0
    sizes, end = Sizes.of(job), job.stages - 1
    one = sizes.slice_tokens * job.model.d_model * sizes.stream
    if job.framework == "megatron":
        return 2 * one, 0.0
    buffers, logits = 0.0, 0.0
    for stage, times in zip(stages, counts, strict=True):
        if stage > 0:
            buffers += one * (job.micro_batches - (times if job.recompute != "none" else 0))
        if stage < end:
            buffers += one * (job.micro_batches + times)
        else:
            of_all = (1 + job.model.mtp_layers) * sizes.tokens * job.model.vocab / sizes.tp
            logits = of_all * sizes.stream * times
    return buffers, logits
