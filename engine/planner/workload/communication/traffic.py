"""Bytes that a rank sends in a step, by axis, as the engine's meter counts them. Formulas: docs/evidence/bytes.md.

How many token vectors (`rows`) a rank sends in the expert all-to-all depends on the data. If the caller does not give
this number, the expected number for a balanced router is used. The letters are those of docs/evidence/bytes.md: b
sequences of a micro-batch, m micro-batches, S tokens of a rank's cp slice, D model width, E experts, K top-k, t = tp, c
= cp, f = fsdp, e = ep.
"""

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from math import ceil, prod

from engine.config.schedule_traits import SCHEDULES
from engine.planner.schedule import action_order
from engine.planner.workload.communication.compressed_gradients import sent_bytes
from engine.planner.workload.communication.exchanges import repeats
from engine.planner.workload.communication.fsdp_units import fsdp_units, shards_whole
from engine.planner.workload.job import Job
from engine.planner.workload.operations import WIDTH
from engine.planner.workload.parameters import Shards
from engine.planner.workload.transformer import Attention, Dense, Experts, LatentAttention, Mixer
from engine.planner.workload.weights import Weight, end_weights, layer_weights

SUM = 4  # bytes of an element in a gradient reduction
COUNT = 8  # bytes of the load counter of an expert
# Number of exchanges over tp in a layer and micro-batch, by recompute mode: gathers of the attention input, scatters of
# the attention output, and both kinds of a dense MLP. Each number includes the exchanges in the backward pass.
GATHERS, SCATTERS = {"none": 2, "selective": 3, "full": 3}, {"none": 2, "selective": 2, "full": 3}
MLP = {"none": 4, "selective": 4, "full": 5}
STATISTICS = 11 + 3 * 6  # number of statistics that a rank sends, without those of layers and experts


def traffic(job: Job, rank: int = 0, rows: float | None = None) -> dict[str, float]:
    """Bytes that `rank` sends in a step, by axis. `rows`: number of token vectors that the rank sends and receives in
    the expert all-to-alls of the forward pass, over all layers and micro-batches; those that it sends to itself do not
    count."""
    return _Rank(job, rank).bytes(rows)


class _Rank:
    """Counts the bytes that one rank of a job sends."""

    def __init__(self, job: Job, rank: int):
        self.job, self.grid = job, job.grid
        at = job.grid.coords(rank)
        self.pp, self.fsdp, self.leader = at["pp"], at["fsdp"], rank == 0
        self.stages = job.stages_of(self.pp)
        self.first, self.last = 0 in self.stages, job.stages - 1 in self.stages
        layers = [job.model.layers[n] for stage in self.stages for n in job.parts[stage]]
        self.layers = Counter(layers)
        self.m = job.micro_batches
        self.tokens = job.seq_len // job.grid.cp
        self.width = WIDTH[job.precision]
        self.X = (
            (job.grid.tp - 1)
            * job.micro_batch
            * (self.tokens // job.grid.tp)
            * job.model.d_model
            * self.width
        )

    def bytes(self, rows: float | None) -> dict[str, float]:
        loads = self._loads()
        return {
            "tp": self._tp() + loads["tp"],
            "cp": self._cp(),
            "pp": self._pp(),
            "dp": self._dp() + loads["dp"],
            "ep": self._ep(rows),
            "control": self._control(),
        }

    def _routed(self) -> Iterator[tuple[Experts, int]]:
        for layer, times in self.layers.items():
            if isinstance(layer.mlp, Experts):
                yield layer.mlp, times

    def _tp(self) -> float:
        job, t = self.job, self.grid.tp
        if t == 1:
            return 0
        gathered = sum(times * self._gathered(layer.mixer) for layer, times in self.layers.items())
        mixers = sum(times for layer, times in self.layers.items() if layer.mixer)
        dense = sum(times for layer, times in self.layers.items() if isinstance(layer.mlp, Dense))
        total: float = self.m * self.X * (mixers * SCATTERS[job.recompute] + dense * MLP[job.recompute])
        total += self.m * self.X * gathered * GATHERS[job.recompute] / job.model.d_model
        loss = (t - 1) * 3 * job.micro_batch * self.tokens * SUM
        total += self.m * (self.first * 2 * self.X + self.last * (2 * self.X + loss))
        if self.grid.cp == 1:
            total += self._asked() * (t - 1)
        return total + 2 * (t - 1) * self._replicated() * SUM // t

    def _gathered(self, mixer: Mixer | None) -> int:
        """Number of elements per token that an attention layer gathers over tp: those of the layer's input or, for
        latent attention, those of the latents."""
        D = self.job.model.d_model
        if isinstance(mixer, LatentAttention):
            return (mixer.q_rank or D) + mixer.kv_rank + mixer.rope_dim
        return D if mixer else 0

    def _asked(self) -> float:
        """Bytes that the routers of a rank send to each of the ranks that have the other slices of the same sequence:
        the scores (half precision), the number of tokens that are routed to each expert, or both."""
        job, total = self.job, 0.0
        for mlp, times in self._routed():
            counts = mlp.experts * 4 * (2 if self.grid.cp > 1 else 1) * job.router_counts
            scores = self.tokens // self.grid.tp * mlp.experts * 2 * job.router_scores
            total += self.m * times * job.micro_batch * (counts + scores)
        return total

    def _replicated(self) -> int:
        """Number of parameters, in this data-parallel rank's shard, of the weights that every tp rank holds whole
        (norms, routers, shared experts)."""
        shards = Shards.of(self.job)
        own = [weight for weight, _ in self._weights() if shards_whole(weight, shards)]
        return sum(self._own(weight.shape, self.grid.fsdp) for weight in own)

    def _own(self, shape: tuple[int, ...], ways: int) -> int:
        rows = ceil(shape[0] / ways)
        return min(rows, max(0, shape[0] - self.fsdp * rows)) * prod(shape[1:])

    def _weights(self) -> Iterator[tuple[Weight, str]]:
        """This rank's weights, each with the kind of its FSDP unit: layer, root (embedding and last norm) or head."""
        model, ends = self.job.model, end_weights(self.job.model)
        for layer, times in self.layers.items():
            for weight in layer_weights(model, layer):
                yield from [(weight, "layer")] * times
        if self.first:
            yield from ((weight, "root") for weight in ends.embedding)
        if self.last:
            yield from ((weight, "root" if weight.part == "norm" else "head") for weight in ends.head)
            if model.tied and not self.first:
                yield ends.embedding[0], "head"

    def _cp(self) -> float:
        job, c = self.job, self.grid.cp
        if c == 1:
            return 0
        again, per_token = job.recompute != "none", 0.0
        for layer, times in self.layers.items():
            mixer = layer.mixer
            if isinstance(mixer, Attention):
                heads, kv, dims = mixer.heads, mixer.kv_heads, 2 * mixer.head_dim
            elif isinstance(mixer, LatentAttention):
                heads = kv = mixer.heads
                dims = mixer.nope_dim + mixer.rope_dim + mixer.v_dim
            else:
                continue
            H, G = heads // self.grid.tp, kv // self.grid.tp
            if job.cp_method == "ulysses":
                per_token += times * (2 + again) * (H // c + max(G // c, 1)) * dims * self.width
            else:
                per_token += times * ((2 + again) * self.width + SUM) * G * dims
        attended = (c - 1) * job.micro_batch * self.tokens * per_token
        return self.m * attended + self._asked() * (c * self.grid.tp - 1)

    def _pp(self) -> float:
        job, grid, last = self.job, self.grid, self.job.stages - 1
        forth = sum(stage < last and stage + 1 not in self.stages for stage in self.stages)
        back = sum(stage > 0 and stage - 1 not in self.stages for stage in self.stages)
        size = job.micro_batch * (self.tokens // grid.tp) * job.model.d_model * self.width
        total = self.m * (forth + back) * size
        if job.model.tied and self.first != self.last:
            total += self._own(end_weights(job.model).embedding[0].local_shape(grid.tp), grid.fsdp) * SUM
        return total

    def _dp(self) -> float:
        job, grid, shards, total = self.job, self.grid, Shards.of(self.job), 0.0
        often, gathers = repeats(job, self.pp), self._gathers()
        for weight, unit in self._weights():
            ways = shards.efsdp if weight.division == "experts" else shards.fsdp
            shape = weight.local_shape(1 if shards_whole(weight, shards) else grid.tp, grid.ep, job.etp)
            shard = ceil(prod(shape) / ways) if shards.flat else ceil(shape[0] / ways) * prod(shape[1:])
            total += (gathers[unit] * self.width + often.reductions * SUM) * (ways - 1) * shard
            if job.compression.method == "none":
                total += 2 * (grid.dp_replicate - 1) * shard * SUM // grid.dp_replicate
        if grid.dp_replicate > 1 and job.compression.method != "none":
            total += sum(
                sent_bytes(job.compression, unit.shapes, grid.dp_replicate)
                for unit in fsdp_units(job, self.pp)
            )
        return total

    def _gathers(self) -> dict[str, float]:
        """For each kind of FSDP unit (layer, root or head), how many times the weights of such a unit are gathered in a
        step."""
        often = repeats(self.job, self.pp)
        return {"layer": often.gathers, "head": often.gathers, "root": often.root}

    def _ep(self, rows: float | None) -> float:
        job, e = self.job, self.grid.ep
        if e == 1:
            return 0
        hops = [e] if job.ep_inner is None else [job.ep_inner, e // job.ep_inner]
        counts, expected = 0.0, 0.0
        for mlp, times in self._routed():
            counts += self.m * times * sum((n - 1) * mlp.experts * COUNT // n for n in hops)
            pairs = job.micro_batch * self.tokens / self.grid.tp * mlp.top_k * job.pairs_run
            expected += self.m * times * 2 * pairs * sum((n - 1) / n for n in hops)
        passes = 3 if job.recompute == "full" else 2
        return passes * (expected if rows is None else rows) * job.model.d_model * self.width + counts

    def _loads(self) -> dict[str, float]:
        """Bytes that a rank sends to sum the experts' loads, by axis: "tp" is for the sum over the tp ranks, and "dp"
        for the sums over the data-parallel ranks and the replicas. Both are 0 unless the router balances the loads with
        biases."""
        if not self.job.bias_balance:
            return {"tp": 0, "dp": 0}
        n = sum(times * mlp.experts * COUNT for mlp, times in self._routed())
        t, f, r = self.grid.tp, self.grid.fsdp, self.grid.dp_replicate
        return {"tp": 2 * (t - 1) * n // t, "dp": 2 * (f - 1) * n // f + 2 * (r - 1) * n // r}

    def _control(self) -> float:
        """Bytes sent for the vote on commands, the gradient norm, the durations of pipeline actions, and the rank's
        statistics."""
        job, world = self.job, self.grid.world
        if world == 1:
            return 0
        splits = _split_backwards(job.schedule, self.grid.pp, job.virtual_stages, self.m)
        actions = 2 * self.m * len(self.stages) + splits
        experts = max(
            (layer.mlp.experts for layer in job.model.kinds if isinstance(layer.mlp, Experts)), default=0
        )
        statistics = 8 * (STATISTICS + len(job.model.layers) * (1 + experts))
        shared = (self.grid.pp - 1) * 8 * (1 + actions) if self.grid.pp > 1 else 0
        norm = 2 * (world - 1) * SUM // world
        return norm + (24 if self.leader else statistics) + shared


@lru_cache(maxsize=1024)
def _split_backwards(schedule: str, ranks: int, virtual_stages: int, micro_batches: int) -> int:
    """Number of split backward passes on the rank with the most actions. DualPipeV splits backward passes only near the
    start and the end of a step, so once a step has more than twice as many micro-batches as there are pipeline ranks,
    further micro-batches do not change this number. Other schedules split all backward passes or none."""
    if not SCHEDULES[schedule].split_backward:
        return 0
    if schedule != "dualpipev":
        return micro_batches * virtual_stages
    few = min(micro_batches, 2 * ranks + 1)
    orders = [action_order(schedule, rank, ranks, virtual_stages, few) for rank in range(ranks)]
    longest = max(([act for turn in turns for act in turn] for turns in orders), key=len)
    return sum(act.kind == "I" for act in longest)
