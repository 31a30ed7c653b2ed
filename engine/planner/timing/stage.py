"""Seconds of a stage's forward and backward passes for one micro-batch, by cause."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.planner.hardware.description import Hardware
from engine.planner.timing.collectives import collective_time, dispatch_time
from engine.planner.timing.kernels import Kernels
from engine.planner.timing.release import Release
from engine.planner.workload.job import Job
from engine.planner.workload.operations import AttentionCore, Collective, Gemm, Memory, Operation

CONTENTION = 0.15  # slowdown of concurrent kernels by a hidden collective, as a share of its time


@dataclass
class Seconds:
    """Time of a pass over a stage: seconds of the device's kernels, exposed seconds of collectives by axis, and number
    of kernel launches."""

    compute: float = 0.0
    launches: float = 0.0
    exposed: dict[str, float] = field(default_factory=dict)

    def add(self, other: "Seconds", times: float = 1) -> None:
        self.compute += times * other.compute
        self.launches += times * other.launches
        for axis, seconds in other.exposed.items():
            self.exposed[axis] = self.exposed.get(axis, 0.0) + times * seconds


class Clock:
    """Predicts the time of a list of operations in a job, on given hardware and with a given framework release."""

    def __init__(self, job: Job, hardware: Hardware, release: Release):
        self.job, self.hardware, self.release = job, hardware, release
        self.kernels = Kernels(hardware, job.precision)

    def time(self, operations: Iterable[Operation]) -> Seconds:
        """Total time of operations that run one after another. If a collective overlaps with computation, only its
        exposed part counts."""
        kernels = self.kernels
        total, hidden = Seconds(), 0.0
        exposed = total.exposed
        for op in operations:
            if isinstance(op, Gemm):
                total.compute += kernels.gemm(op)
                total.launches += op.launches
            elif isinstance(op, Memory):
                total.compute += kernels.memory(op)
                total.launches += op.kernels
            elif isinstance(op, AttentionCore):
                total.compute += kernels.attention(op)
                total.launches += 3 if op.backward else 1
            else:
                seconds = self.collective(op)
                total.launches += 1
                if op.axis == "tp" and self.release.overlap_tp and op.behind:
                    left = max(seconds / op.ranks, seconds - kernels.gemm(op.behind) * (1 - 1 / op.ranks))
                    total.compute += CONTENTION * (seconds - left)
                    seconds = left
                elif op.axis == "ep" and self.job.overlap_experts:
                    hidden += seconds
                    continue
                exposed[op.axis] = exposed.get(op.axis, 0.0) + seconds
        if hidden:
            exposed["ep"] = max(0.0, hidden - total.compute)
            total.compute += CONTENTION * (hidden - exposed["ep"])
        return total

    def collective(self, op: Collective) -> float:
        if op.copies > 1 and self.job.deduplicated:
            return dispatch_time(op.bytes, op.copies, op.ranks, op.stride, self.hardware)
        return collective_time(op.kind, op.bytes, op.ranks, op.stride, self.hardware)
