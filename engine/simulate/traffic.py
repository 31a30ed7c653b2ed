"""Bytes that each rank sends in a simulated step, by axis; for the expert all-to-all, also by destination."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.metering.axes import AXES
from engine.planner.workload.communication.traffic import row_bytes, traffic
from engine.planner.workload.job import Job
from engine.simulate.cluster import Cluster


@dataclass(frozen=True)
class ExpertTraffic:
    """All-to-all traffic of the ranks that share a pp coordinate."""

    sent: NDArray[np.int64]  # [from ep rank, to ep rank]: bytes in a step, zero on the diagonal

    @property
    def bytes(self) -> NDArray[np.int64]:
        """[ep rank]: bytes that the rank sends in a step."""
        found: NDArray[np.int64] = self.sent.sum(1)
        return found


def expert_traffic(job: Job, rank_pairs: float, placed: NDArray[np.float64]) -> ExpertTraffic:
    """Bytes of the rows that ranks exchange in a step.

    `rank_pairs`: number of (token, expert) pairs that one rank's tokens form in each layer and step. `placed` [layer of
    this pipeline rank, ep rank]: share of the pairs that each ep rank processes.

    The forward pass sends each row to its expert and returns the output. The backward pass exchanges the same number of
    rows, and so does full recomputation (docs/evidence/bytes.md). With a hierarchical all-to-all, a row reaches its
    expert in two hops; the first hop stays within the sender's group of `ep_inner` ranks.
    """
    ep = job.grid.ep
    to_rank = np.rint(rank_pairs * placed).sum(0)  # rows that one rank sends to each ep rank
    rows = np.tile(to_rank, (ep, 1))
    np.fill_diagonal(rows, 0)
    if job.ep_inner:
        rows = _two_hops(to_rank, job.ep_inner)
    return ExpertTraffic(((rows + rows.T) * row_bytes(job)).astype(np.int64))


def _two_hops(to_rank: NDArray[np.float64], inner: int) -> NDArray[np.float64]:
    """[from, to] rows. A token row goes first to a rank of the sender's group, the one with the same index in its group
    as the destination, and then to the destination.
    """
    ep = len(to_rank)
    rank = np.arange(ep)
    group, index = rank // inner, rank % inner
    by_index = to_rank.reshape(-1, inner).sum(0)
    within = (group[:, None] == group) & (index[:, None] != index)
    between = (group[:, None] != group) & (index[:, None] == index)
    return np.where(within, by_index[index], 0.0) + np.where(between, inner * to_rank, 0.0)


def axis_bytes(job: Job, cluster: Cluster) -> dict[str, NDArray[np.int64]]:
    """Bytes that each rank sends in a step, excluding the token rows sent to experts. The result maps each axis to an
    array [rank]. The bytes are computed only for rank 0 (the leader) and for the last rank at each pp coordinate; every
    other rank is assumed to send as many bytes as the last rank at its pp coordinate."""
    last = [(pp + 1) * cluster.ranks_of_stage - 1 for pp in range(cluster.grid.pp)]
    of_stages = [traffic(job, rank, rows=0.0) for rank in last]
    leader = traffic(job, 0, rows=0.0)
    found = {}
    for axis in AXES:
        found[axis] = np.rint([one[axis] for one in of_stages]).astype(np.int64)[cluster.pp]
        found[axis][0] = round(leader[axis])
    return found
