"""A simulated run without sockets or wall clock: each call of `step` computes one step of all ranks.

The run is deterministic: the same layout, scenario and seed, with the same knob changes before the same steps, give the
same results.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

import numpy as np
from numpy.typing import NDArray

from agents.protocol import Changes, Summary, Traffic
from engine.config.knob_values import KnobValues
from engine.config.layout import Layout
from engine.config.learning_rate import learning_rate
from engine.metering.axes import AXES
from engine.planner.hardware.description import Hardware
from engine.planner.memory.plan import plan_memory
from engine.planner.what_if import what_if
from engine.planner.workload.flops import FORWARD_AND_BACKWARD, MULTIPLY_ADD, end_flops, layer_flops
from engine.planner.workload.job import Job, Recompute
from engine.planner.workload.parameters import layers_of_rank, stage_layers
from engine.simulate.clock import StepClock, StepTimes, rounded
from engine.simulate.cluster import Cluster
from engine.simulate.conditions import Conditions, Machines
from engine.simulate.routing import Routed, Router
from engine.simulate.scenario import Scenario, check_scenario
from engine.simulate.traffic import ExpertTraffic, axis_bytes, expert_traffic
from engine.simulate.training import Training

RANKS_PER_NODE = 8
LEAK_LIMIT = 0.99  # share of a device's memory that a leak can fill


@dataclass(frozen=True)
class Plan:
    """The values of those knobs that affect the duration of a step but are not in `KnobValues`."""

    schedule: str
    micro_batches: int
    zero: int


@dataclass(frozen=True)
class Simulated:
    """The results of one step for all ranks. Arrays are [rank] unless a comment states another shape."""

    step: int
    job: Job
    times: StepTimes
    conditions: Conditions
    routed: Routed | None
    traffic: list[ExpertTraffic]  # by pipeline rank; empty without expert parallelism
    bytes: dict[str, NDArray[np.int64]]  # by axis
    a2a_bytes: NDArray[np.int64]
    dropped: NDArray[np.int64]
    memory: NDArray[np.int64]  # bytes in use on the device
    tokens: int  # of one rank
    mfu: NDArray[np.float64]
    loss: float
    grad_norm: float
    summary: Summary


class Simulator:
    """The state of a simulated run. Knob changes set `values` and `plan` between steps."""

    def __init__(self, layout: Layout, hardware: Hardware, scenario: Scenario, seed: int):
        nodes_of = hardware.links[0].ranks or RANKS_PER_NODE
        self.planned = what_if(layout, hardware)  # raises an error for layouts that the planner cannot plan
        check_scenario(scenario, layout, nodes_of)
        self.layout, self.hardware, self.scenario = layout, hardware, scenario
        self.cluster = Cluster(layout, nodes_of)
        self.values = KnobValues.of(layout)
        self.plan = Plan(layout.schedule.name, layout.knobs.micro_batches, layout.train.zero)
        self.machines = Machines(self.cluster, scenario, seed)
        self.router = Router(layout, layout.model.moe, scenario, seed) if layout.model.moe else None
        self.training = Training(layout, scenario, seed)
        self.clock = StepClock(self.cluster, hardware, layout.plan.release)
        self.memory = lru_cache(maxsize=64)(self._rank_memory)
        self._axis_bytes = lru_cache(maxsize=64)(lambda job: axis_bytes(job, self.cluster))
        self._job = self.planned.job
        self._imbalance = 1.0
        self._tokens = layout.local_batch * layout.model.seq_len // layout.ranks.cp
        self._layers = [
            [layer for stage in self._job.stages_of(pp) for layer in stage_layers(self._job, stage)]
            for pp in range(layout.grid.pp)
        ]

        moe, model = layout.model.moe, self._job.model
        slice_tokens = FORWARD_AND_BACKWARD * self._tokens / layout.ranks.tp
        routed = MULTIPLY_ADD * 3 * model.d_model * moe.d_expert * moe.top_k if moe else 0
        self._routed_flops = (
            slice_tokens * routed * np.array([self._expert_layers(pp) for pp in range(self._job.grid.pp)])
        )
        self._flops = slice_tokens * np.array([self._forward_flops(pp) for pp in range(self._job.grid.pp)])

    def layers_of(self, pp: int) -> list[int]:
        """The indices of the layers that pipeline rank `pp` holds, with those of multi-token prediction."""
        return self._layers[pp]

    def _forward_flops(self, pp: int) -> float:
        """Forward FLOPs per token on a pipeline rank: those of its layers and, on the rank that has it, of the head."""
        model, job = self._job.model, self._job
        layers = sum(
            times * layer_flops(model, layer, job.seq_len) for layer, times in layers_of_rank(job, pp).items()
        )
        return layers + (end_flops(model) if job.stages - 1 in job.stages_of(pp) else 0.0)

    @property
    def job(self) -> Job:
        """The planner's description of the training job, with the knob values in force and the expert imbalance of the
        last step."""
        return replace(
            self._job,
            schedule=self.plan.schedule,
            micro_batch=self.layout.local_batch // self.plan.micro_batches,
            zero=self.plan.zero,
            recompute=cast(Recompute, self.values.recompute),
            capacity_factor=self.values.capacity_factor,
            imbalance=self._imbalance,
        )

    def _rank_memory(self, job: Job) -> NDArray[np.int64]:
        """[rank]: peak memory of each rank in bytes, including the memory that libraries reserve."""
        by_pp = np.array([int(rank.total) for rank in plan_memory(job, self.hardware).ranks])
        found: NDArray[np.int64] = by_pp[self.cluster.pp]
        return found

    def _memory_in_use(self, job: Job, leaked: int) -> NDArray[np.int64]:
        """[rank]: the planned peak plus the leaked bytes. A leak fills at most the share `LEAK_LIMIT` of the device's
        memory, but the result is never below the planned peak."""
        planned = self.memory(job)
        most = int(LEAK_LIMIT * self.hardware.device.memory_bytes)
        return np.maximum(planned, np.minimum(planned + leaked, most)) if leaked else planned

    def step(self, step: int, revision: int, knobs: Changes, time_s: float) -> Simulated:
        """Simulate training step number `step` with the knob values in force. `revision`, `knobs` and `time_s` are only
        copied to the summary."""
        cluster = self.cluster
        conditions = self.machines.at(step)
        routed = self.router.route(step, self.values) if self.router else None
        placed = self.router.by_ep_rank(routed.kept) if self.router and routed else None
        heat = self._heat(placed)
        job = self.job
        times = self.clock.step(self.clock.predicted(job), conditions, heat)
        traffic = self._traffic(job, placed)
        a2a = np.zeros(cluster.world, dtype=np.int64)
        by_axis = dict(self._axis_bytes(replace(job, imbalance=1.0)))
        if traffic:
            a2a = np.array([one.bytes for one in traffic])[cluster.pp, cluster.ep]
            by_axis["ep"] = by_axis["ep"] + a2a
        dropped = self._dropped(routed)
        pairs = int(routed.load.sum()) if routed else 0
        drop_share = float(dropped.sum() / pairs) if pairs else 0.0
        loss, norm = self.training.advance(step, self.values, drop_share)
        mfu = self._mfu(times.step_s, drop_share)
        return Simulated(
            step,
            job,
            times,
            conditions,
            routed,
            traffic,
            by_axis,
            a2a,
            dropped,
            self._memory_in_use(job, conditions.leaked_bytes),
            self._tokens,
            mfu,
            loss,
            norm,
            self._summary(step, revision, knobs, time_s, times, by_axis, a2a, routed, loss, norm, mfu),
        )

    # ------------------------------------------------------------------------------------------- experts

    def _expert_layers(self, pp: int) -> int:
        return sum(self.layout.model.has_experts(layer) for layer in self._layers[pp])

    def _heat(self, placed: NDArray[np.float64] | None) -> NDArray[np.float64]:
        """[rank]: 0 if the rank's experts have the mean load, 1 for the most loaded rank. This method also sets
        `_imbalance`: the largest load of an ep rank divided by the mean load, averaged over the MoE layers."""
        cluster = self.cluster
        if placed is None or cluster.grid.ep == 1:
            return np.zeros(cluster.world)
        relative = placed * cluster.grid.ep  # [layer, ep rank]: load over the mean
        with_experts = relative.sum(1) > 0
        self._imbalance = rounded(float(relative[with_experts].max(1).mean()))
        by_pp = np.ones((cluster.grid.pp, cluster.grid.ep))
        for pp, layers in enumerate(self._layers):
            mine = [layer for layer in layers if with_experts[layer]]
            if mine:
                by_pp[pp] = relative[mine].mean(0)
        excess = by_pp - 1.0
        most = float(excess.max())
        heat = excess / most if most > 1e-9 else np.zeros_like(excess)
        of_ranks: NDArray[np.float64] = heat[cluster.pp, cluster.ep]
        return of_ranks

    def _traffic(self, job: Job, placed: NDArray[np.float64] | None) -> list[ExpertTraffic]:
        moe = self.layout.model.moe
        if placed is None or moe is None or job.grid.ep == 1:
            return []
        rank_pairs = self._tokens / job.grid.tp * moe.top_k  # each tp rank routes a slice of the sequence
        return [expert_traffic(job, rank_pairs, placed[layers]) for layers in self._layers]

    def _dropped(self, routed: Routed | None) -> NDArray[np.int64]:
        """[rank]: number of token-expert pairs dropped from the rank's tokens. The pairs dropped in a stage are divided
        evenly among the ranks of the stage."""
        cluster = self.cluster
        if routed is None or not routed.dropped.any():
            return np.zeros(cluster.world, dtype=np.int64)
        of_stage = np.array([routed.dropped[layers].sum() for layers in self._layers])
        each, rest = np.divmod(of_stage, cluster.ranks_of_stage)
        place = np.arange(cluster.world) % cluster.ranks_of_stage
        found: NDArray[np.int64] = each[cluster.pp] + (place < rest[cluster.pp])
        return found

    # --------------------------------------------------------------------------------------------- records

    def _rank_flops(self, drop_share: float) -> NDArray[np.float64]:
        """[pipeline rank]: model FLOPs for the tokens of one rank with that pp coordinate; dropped token-expert pairs
        do not count."""
        return self._flops - drop_share * self._routed_flops

    def _mfu(self, step_s: float, drop_share: float) -> NDArray[np.float64]:
        """[rank]: model FLOPs utilisation, the model FLOP/s for the rank's tokens divided by the peak of its device."""
        # As published figures do, divide by the bf16 peak even if matmuls run in fp8 or NVFP4.
        wide = "bf16" if self._job.precision in ("fp8", "nvfp4") else self._job.precision
        peak = self.hardware.device.peak[wide]
        found: NDArray[np.float64] = (self._rank_flops(drop_share) / step_s / peak)[self.cluster.pp]
        return found

    def _summary(
        self,
        step: int,
        revision: int,
        knobs: Changes,
        time_s: float,
        times: StepTimes,
        by_axis: dict[str, NDArray[np.int64]],
        a2a: NDArray[np.int64],
        routed: Routed | None,
        loss: float,
        norm: float,
        mfu: NDArray[np.float64],
    ) -> Summary:
        layout, piped = self.layout, self.cluster.grid.pp > 1
        nothing = np.zeros(1)
        waits = {axis: float(times.exposed.get(axis, nothing).mean()) * 1e3 for axis in AXES}
        rows = [row for row in routed.load if row.any()] if routed else []
        bubble, schedule = float(times.bubble.mean()), float(times.schedule.mean())
        tokens = layout.train.global_batch * layout.model.seq_len
        return Summary(
            step=step,
            revision=revision,
            time_s=time_s,
            loss=loss,
            grad_norm=norm,
            step_ms=times.step_s * 1e3,
            tokens_per_s=tokens / times.step_s,
            mfu=float(mfu.mean()),
            bubble=bubble if piped else None,
            bubble_bound=float(times.bound.mean()) if piped else None,
            oversubscribed=False,
            a2a_bytes=int(a2a.sum()),
            comm={axis: Traffic(int(by_axis[axis].sum()), waits[axis], waits[axis]) for axis in AXES},
            dropped=int(routed.dropped.sum()) if routed else 0,
            load_max_over_mean=max((float(row.max() / row.mean()) for row in rows), default=None),
            knobs=knobs,
            lr=learning_rate(layout.train, step, self.values.lr_scale),
            skipped=not math.isfinite(norm),
            bubble_parts={"schedule": schedule, "wait": bubble - schedule, "overhead": 0.0}
            if piped
            else None,
        )
