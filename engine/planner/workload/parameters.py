"""Parameter counts: of a layer by part, of a model (total and active), and of a rank.

Every count is a sum over the weights that `weights.py` lists.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod
from typing import NamedTuple

from engine.planner.workload.job import Job
from engine.planner.workload.transformer import Layer, Transformer
from engine.planner.workload.weights import Part, Weight, end_weights, layer_weights, prediction_weights


class Parts(Counter[Part]):
    """Number of parameters by part: mixer, dense, router, shared, experts, latent, norm, embedding, head, mtp."""


class Held(NamedTuple):
    """Parameter counts of one rank: all gathered parameters, and the rank's data-parallel shard of them. The first
    shard is counted, because it has the most rows. Experts are sharded over efsdp, all other parameters over
    fsdp."""

    dense: int = 0
    dense_shard: int = 0
    experts: int = 0
    experts_shard: int = 0

    @property
    def whole(self) -> int:
        return self.dense + self.experts

    @property
    def shard(self) -> int:
        return self.dense_shard + self.experts_shard

    def plus(self, other: "Held", times: int = 1) -> "Held":
        return Held(*(a + times * b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Shards:
    """Number of ranks over which a weight is split, by axis. `efsdp`: number of ranks over which data parallelism
    shards an expert. `megatron`: data parallelism shards one flat buffer, as in Megatron-LM's distributed optimizer;
    otherwise it shards the rows of each weight, as in FSDP2, and the first rank has the most rows."""

    tp: int
    ep: int
    etp: int
    fsdp: int
    efsdp: int
    megatron: bool

    @classmethod
    def of(cls, job: Job) -> "Shards":
        grid = job.grid
        return cls(grid.tp, grid.ep, job.etp, grid.fsdp, job.efsdp, job.framework == "megatron")

    def whole(self, weight: Weight) -> bool:
        """Whether every tp rank holds the whole weight. The engine does not split shared experts and the projections of
        multi-token prediction: each tp rank applies them to its slice of the sequence."""
        return weight.division == "whole" or (weight.part in ("shared", "mtp") and not self.megatron)

    def shape(self, weight: Weight) -> tuple[int, ...]:
        """The shape of a weight on one rank, before data parallelism shards it."""
        return weight.local_shape(1 if self.whole(weight) else self.tp, self.ep, self.etp)

    def shard(self, weight: Weight) -> tuple[int, ...]:
        """The shape of a data-parallel shard, with padding."""
        shape, ways = self.shape(weight), self.efsdp if weight.division == "experts" else self.fsdp
        return (ceil(prod(shape) / ways),) if self.megatron else (ceil(shape[0] / ways), *shape[1:])

    def held(self, weight: Weight) -> Held:
        """Number of elements of a weight that one rank holds."""
        size, shard = prod(self.shape(weight)), prod(self.shard(weight))
        return Held(0, 0, size, shard) if weight.division == "experts" else Held(size, shard)


def layer_parameters(model: Transformer, layer: Layer) -> Parts:
    """Parameter counts of a layer, by part (mixer, experts, norms, ...)."""
    return _by_part(Counter(layer_weights(model, layer)))


def total(model: Transformer, mtp: bool = False) -> int:
    """Number of parameters of the model; `mtp`: include the layers of multi-token prediction, which model cards do not
    count."""
    return sum(weight.size * times for weight, times in _weights(model, mtp).items())


def active(model: Transformer, mtp: bool = False) -> int:
    """Number of parameters that one token uses: those of top_k routed experts, and all other parameters, including the
    embedding."""
    return sum(weight.active * times for weight, times in _weights(model, mtp).items())


def by_part(model: Transformer, mtp: bool = False) -> Parts:
    """Parameter counts of the model, by part (mixer, experts, norms, ...)."""
    return _by_part(_weights(model, mtp))


def rank_parameters(job: Job, pp: int) -> Held:
    """Parameter counts of a rank at pipeline coordinate `pp`."""
    held, shards = Held(), Shards.of(job)
    for stage in job.stages_of(pp):
        for layer, times in Counter(stage_layers(job, stage).values()).items():
            held = held.plus(layer_held(job.model, layer, shards), times)
        held = held.plus(_held(tuple(weight for _, weight in _ends(job, stage)), shards))
    return held


def stage_weights(job: Job, stage: int) -> Iterator[tuple[int | str | None, Weight]]:
    """The weights of a pipeline stage, each with the part of the stage to which it belongs: the number of a layer (the
    layers of multi-token prediction follow those of the model); "head"; or None, for all other weights."""
    for number, layer in stage_layers(job, stage).items():
        yield from ((number, weight) for weight in layer_weights(job.model, layer))
    yield from _ends(job, stage)


def root_held(job: Job, pp: int) -> Held:
    """Parameter counts of the weights on a rank that are outside the layers."""
    weights = (weight for stage in job.stages_of(pp) for _, weight in _ends(job, stage))
    return _held(tuple(weights), Shards.of(job))


def layers_of_rank(job: Job, pp: int) -> Counter[Layer]:
    """The kinds of layers on a rank, including those of multi-token prediction, and how many there are of each."""
    return Counter(layer for stage in job.stages_of(pp) for layer in stage_layers(job, stage).values())


def stage_layers(job: Job, stage: int) -> dict[int, Layer]:
    """The layers of a stage by number. The last stage also has those of multi-token prediction, whose numbers follow
    those of the model's layers."""
    layers = job.model.layers
    found = {number: layers[number] for number in job.parts[stage]}
    if stage == job.stages - 1:
        found |= dict.fromkeys(range(len(layers), len(layers) + job.model.mtp_layers), layers[-1])
    return found


def _ends(job: Job, stage: int) -> Iterator[tuple[str | None, Weight]]:
    """The weights of a stage outside its layers. If the head is tied or there is multi-token prediction, a last stage
    without the embedding has a copy of the embedding's weight. In Megatron-LM, two stages of the same rank share it."""
    ends, model, last = end_weights(job.model), job.model, job.stages - 1
    if stage == 0:
        yield from ((None, weight) for weight in ends.embedding)
    if stage == last:
        yield from ((None if weight.part == "norm" else "head", weight) for weight in ends.head)
        yield from ((None, weight) for weight in model.mtp_layers * ends.prediction)
        shared = stage == 0 or (job.framework == "megatron" and _same_rank(job))
        if (model.tied or model.mtp_layers) and not shared:
            yield None if model.mtp_layers else "head", ends.embedding[0]


def _same_rank(job: Job) -> bool:
    """Whether one pipeline rank has both the first and the last stage."""
    return job.stages - 1 in job.stages_of(0)


def embedding_copied(job: Job) -> bool:
    """Whether the first and the last pipeline rank each have a copy of the embedding's weight, so that they sum its
    gradient."""
    return (job.model.tied or job.model.mtp_layers > 0) and not _same_rank(job)


def layer_held(model: Transformer, layer: Layer, shards: Shards) -> Held:
    """Parameter counts of a layer on one rank."""
    return _held(layer_weights(model, layer), shards)


@lru_cache(maxsize=65_536)
def _held(weights: tuple[Weight, ...], shards: Shards) -> Held:
    held = Held()
    for weight in weights:
        held = held.plus(shards.held(weight))
    return held


def _weights(model: Transformer, mtp: bool) -> Counter[Weight]:
    """How often each `Weight` description occurs in the model. Weights of different layers count as the same `Weight`
    if they have the same part, name and shape and are split in the same way."""
    counts: Counter[Weight] = Counter()
    for layer, times in model.kinds.items():
        for weight in layer_weights(model, layer):
            counts[weight] += times
    ends = end_weights(model)
    counts.update([*ends.embedding, *ends.head, *(prediction_weights(model) if mtp else ())])
    return counts


def _by_part(counts: Mapping[Weight, int]) -> Parts:
    parts = Parts()
    for weight, times in counts.items():
        parts[weight.part] += weight.size * times
    return parts
