"""Bytes that a rank of a simulated step sends: by axis, and of the all-to-alls of experts by destination."""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from engine.metering.axes import AXES
from engine.planner.workload.job import Job
from engine.planner.workload.layer_work import layer_work
from engine.planner.workload.operations import Collective
from engine.planner.workload.parameters import rank_parameters

WIDTH = {"fp32": 4, "bf16": 2, "fp8": 2, "nvfp4": 2}  # bytes of an element of a row
COUNT_BYTES = 8


@dataclass(frozen=True)
class ExpertTraffic:
    """All-to-all traffic of the ranks of one pipeline rank."""

    sent: NDArray[np.int64]  # [ep rank, ep rank]: bytes from one to another in a step, zero on the diagonal

    @property
    def bytes(self) -> NDArray[np.int64]:
        """[ep rank]"""
        found: NDArray[np.int64] = self.sent.sum(1)
        return found


def expert_traffic(job: Job, rank_pairs: float, placed: NDArray[np.float64]) -> ExpertTraffic:
    """Rows that cross ranks in a step. `rank_pairs`: (token, expert) pairs of one rank's tokens in a layer and step;
    `placed` [layer of this pipeline rank, ep rank]: share of the pairs that each ep rank processes.

    Forward sends each row to its expert and returns the output; backward does the same, and so does full recomputation
    (docs/bytes.md). With a hierarchical all-to-all a row takes two hops, first within its group of `ep_inner` ranks.
    """
    ep = job.grid.ep
    to_rank = np.rint(rank_pairs * placed).sum(0)  # rows from one rank to each ep rank
    rows = np.tile(to_rank, (ep, 1))
    np.fill_diagonal(rows, 0)
    if job.ep_inner:
        rows = _two_hops(to_rank, job.ep_inner)
    passes = 3 if job.recompute == "full" else 2
    size = job.model.d_model * WIDTH[job.precision]
    return ExpertTraffic(((rows + rows.T) * (passes * size)).astype(np.int64))


def _two_hops(to_rank: NDArray[np.float64], inner: int) -> NDArray[np.float64]:
    """[from, to] rows: a hop within the group to the destination's index, then between groups."""
    ep = len(to_rank)
    rank = np.arange(ep)
    group, index = rank // inner, rank % inner
    by_index = to_rank.reshape(-1, inner).sum(0)
    within = (group[:, None] == group) & (index[:, None] != index)
    between = (group[:, None] != group) & (index[:, None] == index)
    return np.where(within, by_index[index], 0.0) + np.where(between, inner * to_rank, 0.0)


def count_bytes(job: Job, layers: int) -> int:
    """Bytes of the exchanged counts of rows in a step, of one rank with `layers` layers of experts."""
    ep, inner = job.grid.ep, job.ep_inner
    experts = max((getattr(layer.mlp, "experts", 0) for layer in job.model.kinds), default=0)
    hops = (ep,) if not inner else (inner, ep // inner)
    return sum(job.micro_batches * layers * experts * COUNT_BYTES * (n - 1) // n for n in hops)


SENT = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_reduce": 2.0, "all_to_all": 1.0}
"""Bytes that a rank of a collective over P sends, in units of (P - 1) / P of the whole buffer."""
PLANNED_WIDTH = 2  # bytes of a number in the planner's operations


@lru_cache(maxsize=256)
def axis_bytes(job: Job) -> dict[str, NDArray[np.int64]]:
    """Bytes that a rank sends in a step by axis, [pipeline rank], except the rows of experts: of the planner's
    operations in layers, of the sends between stages, and of the reductions and gathers over data parallelism."""
    grid = job.grid
    sums = {axis: np.zeros(grid.pp) for axis in AXES}
    for pp in range(grid.pp):
        for stage in job.stages_of(pp):
            for layer, times in Counter(job.model.layers[n] for n in job.parts[stage]).items():
                work = layer_work(job, layer)
                again = {"none": (), "selective": work.core, "full": work.forward}[job.recompute]
                for operation in (*work.forward, *work.backward, *again):
                    if isinstance(operation, Collective) and operation.axis in ("tp", "cp"):
                        sums[operation.axis][pp] += times * job.micro_batches * _sent(job, operation)
        message = job.local_tokens * job.model.d_model * WIDTH[job.precision]
        sums["pp"][pp] = job.micro_batches * _messages(job, pp) * message
        sums["dp"][pp] = _data_parallel(job, pp)
    return {axis: np.rint(of_axis).astype(np.int64) for axis, of_axis in sums.items()}


def _sent(job: Job, operation: Collective) -> float:
    share = (operation.ranks - 1) / operation.ranks
    return operation.bytes * share * SENT[operation.kind] * WIDTH[job.precision] / PLANNED_WIDTH


def _messages(job: Job, pp: int) -> int:
    """Activations and their gradients that a pipeline rank sends for a micro-batch."""
    owner = {stage: rank for rank in range(job.grid.pp) for stage in job.stages_of(rank)}
    ways = [(stage, stage + by) for stage in job.stages_of(pp) for by in (-1, 1)]
    return sum(there in owner and owner[there] != pp for _, there in ways)


def _data_parallel(job: Job, pp: int) -> float:
    """Gathers of weights and reductions of gradients (fp32), and sums over replicas (docs/bytes.md, dp)."""
    grid, m = job.grid, job.micro_batches
    held, piped = rank_parameters(job, pp), grid.pp > 1
    gathers = {3: 2 * m}.get(job.zero, 1)
    reductions = m if job.zero >= 2 and not piped else 1
    total = 0.0
    for numbers, ranks in ((held.dense, grid.fsdp), (held.experts, job.efsdp)):
        share = (ranks - 1) / ranks
        total += share * numbers * (gathers * WIDTH[job.precision] + reductions * 4)
        total += 2 * (grid.dp_replicate - 1) / grid.dp_replicate * numbers / ranks * 4
    return total
