"""Quick lower bounds on the step time and memory of a choice (a candidate layout). The computation is predicted once
for each combination of cp, tp, ep, micro-batch size and recompute mode, as if one pipeline rank held the whole model.

The bound on time is the time of the slowest rank, which computes its stages for m micro-batches and waits for the
pipeline to fill. The bound on memory is the mean size of a rank's state (parameters, gradients, optimizer state) plus
the activations of the first rank's micro-batches in flight. The bounds leave out costs that only a full plan computes:
sends, the optimizer step, the bubble of a split backward pass, and working memory. The bounds are approximate: in rare
cases, the planner's full prediction of a candidate's step time or memory is below its bound.
"""

from dataclasses import replace
from functools import lru_cache
from math import lcm

from engine.config.grid import Grid
from engine.config.layout import Layout
from engine.config.schedule_traits import SCHEDULES, stages_of_rank
from engine.planner.hardware.description import Hardware
from engine.planner.layer_split import split_layers, stage_weights
from engine.planner.memory.in_flight import counts_in_flight
from engine.planner.memory.peak import LayerBytes
from engine.planner.memory.plan import RESERVED
from engine.planner.memory.state import state_of
from engine.planner.search.space import Choice
from engine.planner.timing.collectives import collective_time
from engine.planner.timing.pipeline import rank_times
from engine.planner.timing.predict import predict
from engine.planner.timing.release import release as known_release
from engine.planner.timing.stage import CONTENTION
from engine.planner.workload.job import Job
from engine.planner.workload.operations import WIDTH
from engine.planner.workload.parameters import Held, by_part, total


class Bounds:
    """Computes lower bounds on step time and memory for a layout whose settings are replaced by those of a `Choice`."""

    def __init__(self, layout: Layout, hardware: Hardware, release: str | None):
        self.job, self.model, self.hardware, self.name = Job.of(layout), layout.model, hardware, release
        self.release = known_release(release)
        self.experts = by_part(self.job.model, mtp=True)["experts"]
        self.others = total(self.job.model, mtp=True) - self.experts
        self.framework = RESERVED * hardware.device.memory_bytes
        self._micro_batch = lru_cache(maxsize=None)(self._count_micro_batch)
        self._state = lru_cache(maxsize=None)(self._count_state)
        self._exchange = lru_cache(maxsize=None)(self._count_exchange)
        self._slowest = lru_cache(maxsize=None)(self._share_of_slowest)
        self._in_flight = lru_cache(maxsize=None)(self._models_in_flight)

    def seconds(self, choice: Choice) -> float:
        """Approximate lower bound on the step time in seconds."""
        pp, m = choice.pp, self._micro_batches(choice)
        forward, backward, _ = self._micro_batch(
            choice.cp, choice.tp, choice.ep, choice.micro_batch, choice.recompute
        )
        share = self._slowest(choice.schedule, pp, choice.virtual_stages)
        forward, backward = forward * share, backward * share
        rank = forward + backward
        split = SCHEDULES[choice.schedule].split_backward
        waiting = 0.0 if split else (pp - 1) * rank / choice.virtual_stages
        reduce, gather = self._exchange(
            pp, choice.dp_replicate, choice.dp_shard, choice.cp, choice.tp, choice.ep, choice.zero
        )
        if not self.release.overlap_dp:
            exposed = reduce + gather
        elif choice.zero == 3 and pp > 1 and self.job.framework == "engine":
            # Each micro-batch has at least one gather.
            exposed = m * _exposed(gather, rank / 2) + _exposed(reduce, backward)
        elif choice.zero == 3:
            exposed = m * (_exposed(gather, forward) + _exposed(reduce + gather, backward))
        else:
            reductions = m if choice.zero == 2 and pp == 1 else 1
            exposed = reductions * _exposed(reduce, backward) + _exposed(gather, forward)
        return m * rank + waiting + exposed

    def bytes(self, choice: Choice) -> float:
        """Lower bound on the memory, in bytes, of the rank that needs the most. The bound is valid only if all layers
        keep the same number of bytes for the backward pass."""
        pp, v, m = choice.pp, choice.virtual_stages, self._micro_batches(choice)
        *_, kept = self._micro_batch(choice.cp, choice.tp, choice.ep, choice.micro_batch, choice.recompute)
        state = self._state(
            pp, choice.dp_replicate, choice.dp_shard, choice.cp, choice.tp, choice.ep, choice.zero
        )
        return state + self.framework + kept * self._in_flight(choice.schedule, pp, v, m)

    def _micro_batches(self, choice: Choice) -> int:
        return self.job.global_batch // (choice.dp_replicate * choice.dp_shard) // choice.micro_batch

    def _count_micro_batch(
        self, cp: int, tp: int, ep: int, micro_batch: int, recompute: str
    ) -> tuple[float, float, float]:
        """Seconds of a micro-batch's forward and backward passes through the whole model, and the bytes kept for the
        backward pass."""
        shard = lcm(ep, cp * tp) // (cp * tp)
        job = replace(
            self.job,
            grid=Grid(dp_shard=shard, cp=cp, tp=tp, ep=ep),
            global_batch=micro_batch * shard,
            micro_batch=micro_batch,
            schedule="1f1b",
            virtual_stages=1,
            split=None,
            recompute=recompute,  # type: ignore[arg-type]
            recomputed=self.job.recomputed if recompute == "none" else (),
            zero=1,
        )
        time = predict(job, self.hardware, self.name)
        layers = LayerBytes(job)
        kept = sum(sum(layers.kept(layer).values()) * times for layer, times in job.model.kinds.items())
        return time.forward[0], time.backward[0], kept

    def _share_of_slowest(self, schedule: str, pp: int, virtual: int) -> float:
        """The slowest rank's share of the model's multiply-adds."""
        weights = stage_weights(self.model, split_layers(self.model, pp * virtual))
        ranks = rank_times(schedule, pp, virtual, weights, [0.0] * len(weights))
        return max(ranks) / sum(weights)

    def _models_in_flight(self, schedule: str, pp: int, virtual: int, m: int) -> float:
        """Peak activations in flight on the first rank, as a multiple of the activations of one micro-batch in all
        layers of the model. Each micro-batch in flight on a stage is weighted by the fraction of the model's layers
        that the stage has."""
        layers = [len(part) for part in split_layers(self.model, pp * virtual)]
        mine = [layers[stage] for stage in sorted(stages_of_rank(schedule, 0, pp, virtual))]
        reached = counts_in_flight(schedule, 0, pp, virtual, m)
        return max(sum(n * size for n, size in zip(counts, mine, strict=True)) for counts in reached) / sum(
            layers
        )

    def _held(self, pp: int, shard: int, cp: int, tp: int, ep: int) -> Held:
        """Mean number of parameters per rank."""
        dense, experts = self.others / pp / tp, self.experts / pp / ep
        efsdp = max(1, shard * cp * tp // ep)
        return Held(*(int(n) for n in (dense, dense / (shard * cp), experts, experts / efsdp)))

    def _count_state(
        self, pp: int, replicate: int, shard: int, cp: int, tp: int, ep: int, zero: int
    ) -> float:
        """Mean bytes of parameters, gradients and optimizer state per rank."""
        job = replace(
            self.job,
            grid=Grid(pp, replicate, shard, cp, tp, ep),
            schedule="1f1b",
            virtual_stages=1,
            split=None,
            zero=zero,
        )
        state = state_of(job, pp // 2, self._held(pp, shard, cp, tp, ep))
        return state.parameters + state.gradients + state.optimizer

    def _count_exchange(
        self, pp: int, replicate: int, shard: int, cp: int, tp: int, ep: int, zero: int
    ) -> tuple[float, float]:
        """Seconds to reduce all gradients once, and seconds to gather all weights once."""
        held, wide = self._held(pp, shard, cp, tp, ep), self.release.gradient_bytes
        width = wide if zero == 0 else WIDTH[self.job.precision]
        reduce = gather = 0.0
        for numbers, ranks, stride in (
            (held.dense, shard * cp, tp),
            (held.experts, max(1, shard * cp * tp // ep), ep),
        ):
            reduce += collective_time("reduce_scatter", numbers * wide, ranks, stride, self.hardware)
            gather += collective_time("all_gather", numbers * width, ranks, stride, self.hardware)
            if replicate > 1:
                size = numbers / ranks * wide
                reduce += collective_time("all_reduce", size, replicate, stride * ranks, self.hardware)
        factor = self.release.factor
        return reduce * factor, gather * factor


def _exposed(exchange: float, compute: float) -> float:
    """Seconds that an exchange adds to a concurrent computation: its exposed part, and the slowdown that its hidden
    part causes."""
    return max(0.0, exchange - compute) + CONTENTION * min(exchange, compute)
