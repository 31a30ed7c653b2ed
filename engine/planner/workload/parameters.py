"""Parameter counts: of a layer by part, of a model (total and active), and of a rank.

Every count is a sum over the weights that `weights.py` lists.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod
from typing import NamedTuple

from engine.planner.workload.job import Job
from engine.planner.workload.transformer import Layer, Transformer
from engine.planner.workload.weights import Part, Weight, end_weights, layer_weights


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
    shards an expert. `flat`: data parallelism shards one flat buffer, as in Megatron-LM's distributed optimizer;
    otherwise it shards the rows of each weight, as in FSDP2, and the first rank has the most rows."""

    tp: int
    ep: int
    etp: int
    fsdp: int
    efsdp: int
    flat: bool
    shared_over_tp: bool

    @classmethod
    def of(cls, job: Job) -> "Shards":
        grid, megatron = job.grid, job.framework == "megatron"
        return cls(grid.tp, grid.ep, job.etp, grid.fsdp, job.efsdp, megatron, megatron)

    def held(self, weight: Weight) -> Held:
        """Number of elements of a weight that one rank holds."""
        expert = weight.division == "experts"
        # The engine keeps shared experts whole: each tp rank applies them to its slice of the sequence.
        tp = 1 if weight.part == "shared" and not self.shared_over_tp else self.tp
        shape, ways = weight.local_shape(tp, self.ep, self.etp), self.efsdp if expert else self.fsdp
        size = prod(shape)
        shard = ceil(size / ways) if self.flat else ceil(shape[0] / ways) * prod(shape[1:])
        return Held(0, 0, size, shard) if expert else Held(size, shard)


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
    held = Held()
    for stage in job.stages_of(pp):
        held = held.plus(stage_parameters(job, stage))
    first, last = 0 in job.stages_of(pp), job.stages - 1 in job.stages_of(pp)
    return held.plus(ends_held(job, first, last))


def stage_parameters(job: Job, stage: int) -> Held:
    """Parameter counts of a stage's layers on one rank, without embedding and head."""
    held, model = Held(), job.model
    for layer, times in Counter(model.layers[n] for n in job.parts[stage]).items():
        held = held.plus(layer_held(model, layer, Shards.of(job)), times)
    return held


def ends_held(job: Job, first: bool, last: bool) -> Held:
    """Parameter counts of the embedding (`first`) and the head (`last`) on one rank. A tied head that is not on the
    embedding's rank has a copy of the embedding's weight. Multi-token prediction, which runs on the head's rank, needs
    a copy of the embedding's weight even if the head is not tied."""
    ends, weights = end_weights(job.model), list[Weight]()
    if first:
        weights += ends.embedding
    if last:
        weights += [*ends.head, *ends.mtp]
        if not first and (job.model.tied or job.model.mtp_layers):
            weights.append(ends.embedding[0])
    return _held(tuple(weights), Shards.of(job))


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
    counts.update([*ends.embedding, *ends.head, *(ends.mtp if mtp else ())])
    return counts


def _by_part(counts: Mapping[Weight, int]) -> Parts:
    parts = Parts()
    for weight, times in counts.items():
        parts[weight.part] += weight.size * times
    return parts
