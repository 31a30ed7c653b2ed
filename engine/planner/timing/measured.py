"""Predicts the time of a collective from the measurements of `engine probe` and `engine collectives`."""

from collections.abc import Sequence

from msgspec.structs import replace

from engine.planner.hardware.description import Hardware, MeasuredCollective
from engine.planner.timing.costs import ALGORITHMS, DOMINATED, Cost, cost, share_of_others

HIERARCHICAL = "hierarchical"
MOST_BYTES = 2**53  # largest buffer size that is told apart from "no limit"


def cost_of(kind: str, algorithm: str, ranks: int) -> Cost:
    """How many messages and bytes `algorithm` sends. If its cost is not known, for example because the backend (Gloo or
    NCCL) chose the algorithm, the function assumes P - 1 messages and as many bytes as a ring algorithm sends."""
    if kind in ("send", "ring"):
        return Cost(1, 1)
    if algorithm in ALGORITHMS.get(kind, {}) or algorithm in DOMINATED.get(kind, {}):
        return cost(kind, algorithm, ranks)
    return Cost(ranks - 1, (2 if kind == "all_reduce" else 1) * share_of_others(ranks))


def per_message(row: MeasuredCollective) -> tuple[float, float]:
    """Latency of one message in seconds, and seconds per byte sent."""
    found = cost_of(row.kind, row.algorithm, row.ranks)
    return row.latency / found.steps, row.per_byte / found.sent


def share_of_cores(ranks: int, hardware: Hardware) -> float:
    """The number of ranks per core, but at least 1, if all `ranks` ranks share the cores of one machine; 1 if each rank
    has its own device."""
    cores = hardware.measured.cores if hardware.measured else None
    return max(1.0, ranks / cores) if cores else 1.0


def measured_time(
    kind: str, size: float, ranks: int, stride: int, hardware: Hardware
) -> tuple[float, str] | None:
    """The time of a collective in seconds, and its algorithm, from measurements on groups of the same size and stride.

    If no such group was measured, the group with the nearest size is used; among several, the one with the nearest
    stride. The measured latency is scaled by the algorithm's number of messages, and the measured seconds per byte by
    the number of bytes that the algorithm sends. Returns None if the collective was never measured.
    """
    rows = similar(hardware.measured.collectives, kind, ranks, stride) if hardware.measured else []
    if not rows:
        return None
    fits = [row for row in rows if row.most_bytes is None or size * ranks <= row.most_bytes * row.ranks]
    return min(_scaled(row, size, ranks) for row in fits[:1] or rows[-1:])


def _scaled(row: MeasuredCollective, size: float, ranks: int) -> tuple[float, str]:
    latency, slope = per_message(row)
    scaled = cost_of(row.kind, row.algorithm, ranks)
    return latency * scaled.steps + size * slope * scaled.sent, row.algorithm


def similar(
    rows: Sequence[MeasuredCollective], kind: str, ranks: int, stride: int
) -> list[MeasuredCollective]:
    """The measurements of the group that is most similar to a group of `ranks` ranks with this stride. Returns an empty
    list if the collective was not measured. A hierarchical algorithm is used only for the number of ranks with which it
    was measured."""
    rows = [row for row in rows if row.kind == kind and row.axis != "control"]
    if not rows:
        return []
    best = min(rows, key=lambda row: (abs(row.ranks - ranks), row.stride != stride, abs(row.stride - stride)))
    alike = [row for row in rows if (row.ranks, row.stride, row.axis) == (best.ranks, best.stride, best.axis)]
    return [row for row in alike if row.ranks == ranks or row.algorithm != HIERARCHICAL]


def fastest(rows: Sequence[MeasuredCollective]) -> list[MeasuredCollective]:
    """Those algorithms of one collective that are the fastest for some range of buffer sizes, in ascending order of
    size. An algorithm's `most_bytes` is the size above which the next algorithm is faster; None for the last algorithm.
    """
    if not rows:
        return []
    found = []
    current = min(rows, key=lambda row: (row.latency, row.per_byte))
    while steeper := [row for row in rows if row.per_byte < current.per_byte]:
        faster_from = min((_crossover(current, row), row.per_byte) for row in steeper)
        if most := int(min(faster_from[0], MOST_BYTES)):
            found.append(replace(current, most_bytes=most))
        current = next(row for row in steeper if (_crossover(current, row), row.per_byte) == faster_from)
    return [*found, replace(current, most_bytes=None)]


def _crossover(flat: MeasuredCollective, long: MeasuredCollective) -> float:
    """The buffer size in bytes above which `long`, the algorithm with less time per byte, is faster than `flat`."""
    return (long.latency - flat.latency) / (flat.per_byte - long.per_byte)


def with_chosen(hardware: Hardware) -> Hardware:
    """The hardware description for a run with the setting `run.collectives`, in which an all-reduce of each size uses
    the fastest measured algorithm. Returns `hardware` unchanged if no algorithms were measured."""
    measured = hardware.measured
    if measured is None or not (reduces := [row for row in measured.algorithms if row.kind == "all_reduce"]):
        return hardware
    groups = sorted({(row.ranks, row.stride) for row in reduces})
    chosen = [
        row
        for group in groups
        for row in fastest([row for row in reduces if (row.ranks, row.stride) == group])
    ]
    others = [row for row in measured.collectives if row.kind != "all_reduce"]
    return replace(hardware, measured=replace(measured, collectives=(*others, *chosen)))
