"""Strong and weak scaling: the predicted time of a job for increasing numbers of data-parallel ranks.

Strong scaling keeps the batch size per step (Amdahl 1967); weak scaling keeps the batch size per rank (Gustafson 1988,
doi 10.1145/42411.42415). tp, cp and pp keep their sizes, so only dp_shard grows with the number of ranks. If a rank has
too few sequences for the minimum number of micro-batches at the job's micro-batch size, its micro-batches become
smaller.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from engine.config.grid import divisors
from engine.config.schedule_traits import min_micro_batches
from engine.planner.hardware.description import Hardware
from engine.planner.timing.predict import predict
from engine.planner.timing.step import Prediction
from engine.planner.workload.job import Job

Kind = Literal["strong", "weak"]
DOUBLINGS = 6  # number of times that the number of ranks is doubled by default


@dataclass(frozen=True)
class Point:
    """A point of the scaling curve: a number of ranks with its prediction and efficiency, or the reason why it has no
    prediction."""

    ranks: int
    batch: int
    prediction: Prediction | None
    efficiency: float = 0.0  # tokens/s per rank, relative to the first point
    refusal: str = ""


def default_ranks(job: Job) -> list[int]:
    """The job's own number of ranks, and that number doubled 1 to `DOUBLINGS` times."""
    return [job.grid.world * 2**n for n in range(DOUBLINGS + 1)]


def scaling(
    job: Job, hardware: Hardware, kind: Kind, ranks: Iterable[int] | None = None, release: str | None = None
) -> list[Point]:
    """The strong or weak scaling curve (`kind`): one point for each number of ranks, in ascending order. Efficiencies
    are relative to the first point that has a prediction."""
    return list(_points(job, hardware, kind, sorted(set(ranks or default_ranks(job))), release))


def _points(
    job: Job, hardware: Hardware, kind: Kind, ranks: list[int], release: str | None
) -> Iterator[Point]:
    first: float | None = None
    for count in ranks:
        scaled = scaled_job(job, kind, count)
        if isinstance(scaled, str):
            yield Point(count, 0, None, refusal=scaled)
            continue
        prediction = predict(scaled, hardware, release)
        each = prediction.tokens_per_s / count
        first = first or each
        yield Point(count, scaled.global_batch, prediction, each / first)


def scaled_job(job: Job, kind: Kind, ranks: int) -> Job | str:
    """The job on `ranks` ranks, or one sentence that says why the job cannot use that number of ranks."""
    grid = job.grid
    unit = grid.world // grid.dp_shard
    if ranks % unit or ranks < unit:
        return f"{ranks} ranks are not a multiple of pp x dp_replicate x cp x tp = {unit}"
    larger = replace(grid, dp_shard=ranks // unit)
    if refusal := larger.refusal():
        return refusal
    batch = job.global_batch if kind == "strong" else job.global_batch * larger.dp // grid.dp
    local, rest = divmod(batch, larger.dp)
    if rest or not local:
        return f"a batch of {batch} is not a multiple of dp = {larger.dp}"
    least = min_micro_batches(job.schedule, grid.pp, job.virtual_stages)
    if local < least:
        return f"a rank's batch of {local} is too small for the {least} micro-batches of {job.schedule}"
    micro_batch = max(n for n in divisors(local) if n <= min(job.micro_batch, local // least))
    return replace(job, grid=larger, global_batch=batch, micro_batch=micro_batch)
