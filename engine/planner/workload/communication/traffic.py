"""Bytes that a rank sends in a step, by axis, as the engine's meter counts them. Formulas: docs/evidence/bytes.md.

The bytes are summed over the collectives of the rank (`exchanges.py`), and only those of the control messages, which
take no time of a step, are computed here. For a job of Megatron-LM, the small exchanges of the loss and of the routers
are left out. How many token vectors (`rows`) a rank sends in the expert all-to-all depends on the data. If the caller
does not give this number, the expected number for a balanced router is used.
"""

from functools import lru_cache
from math import ceil

from engine.config.schedule_traits import SCHEDULES
from engine.planner.schedule import action_order
from engine.planner.workload.communication.exchanges import passes_of_rows, rank_exchanges
from engine.planner.workload.job import Job
from engine.planner.workload.operations import WIDTH

AXES = ("tp", "cp", "pp", "dp", "ep", "control")
SUM = 4  # bytes of an element in a gradient reduction
STATISTICS = 11 + 3 * 6  # number of statistics that a rank sends, without those of layers, experts and ranks
RANKS_MARKED = 48  # number of ranks for which one statistic says which of them have a loss that is not finite


def traffic(
    job: Job, rank: int = 0, rows: float | None = None, gradient_bytes: float = SUM
) -> dict[str, float]:
    """Bytes that `rank` sends in a step, by axis. `rows`: number of token vectors that the rank sends and receives in
    the expert all-to-alls of the forward pass, over all layers and micro-batches; those that it sends to itself do not
    count. `gradient_bytes`: bytes of an element in a gradient reduction."""
    at = job.grid.coords(rank)
    sent = dict.fromkeys(AXES, 0.0)
    for one in rank_exchanges(job, at["pp"], gradient_bytes, at["fsdp"]):
        if one.load is None or rows is None:
            sent[one.axis] += one.sent
    if rows:
        sent["ep"] += rows * row_bytes(job)
    sent["control"] = _control(job, rank)
    return sent


def row_bytes(job: Job) -> int:
    """Bytes that the row of a (token, expert) pair takes in a step, each time it is sent or received in the forward
    pass."""
    return passes_of_rows(job) * job.model.d_model * WIDTH[job.precision]


def _control(job: Job, rank: int) -> float:
    """Bytes sent for the vote on commands, the gradient norm, the durations of pipeline actions, and the rank's
    statistics."""
    grid, world = job.grid, job.grid.world
    if world == 1:
        return 0
    splits = _split_backwards(job.schedule, grid.pp, job.virtual_stages, job.micro_batches)
    actions = 2 * job.micro_batches * len(job.stages_of(grid.coords(rank)["pp"])) + splits
    experts = max((mlp.experts for mlp in job.model.experts), default=0)
    marks = ceil(world / RANKS_MARKED)
    statistics = 8 * (STATISTICS + marks + (len(job.model.layers) + job.model.mtp_layers) * (1 + experts))
    shared = (grid.pp - 1) * 8 * (1 + actions) if grid.pp > 1 else 0
    norm = 2 * (world - 1) * SUM // world
    return norm + (24 if rank == 0 else statistics) + shared


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
