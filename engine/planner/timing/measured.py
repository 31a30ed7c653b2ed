"""Seconds of a collective, from the measurements of `engine probe`."""

from engine.planner.hardware.description import Hardware, MeasuredCollective


def messages(kind: str, algorithm: str, ranks: int) -> float:
    """Number of consecutive messages of a collective over `ranks` ranks (see `engine.planner.timing.collectives`)."""
    if kind in ("send", "ring"):
        return 1.0
    return (2.0 if kind == "all_reduce" and algorithm == "ring" else 1.0) * (ranks - 1)


def sent(kind: str, algorithm: str, ranks: int) -> float:
    """Bytes that a rank sends, as a share of the buffer."""
    if kind in ("send", "ring"):
        return 1.0
    if kind == "all_reduce":  # direct: a rank sends the whole buffer to each other rank
        return ranks - 1.0 if algorithm == "direct" else 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks


def per_message(row: MeasuredCollective) -> tuple[float, float]:
    """Latency of one message in seconds, and seconds per sent byte."""
    return (
        row.latency / messages(row.kind, row.algorithm, row.ranks),
        row.per_byte / sent(row.kind, row.algorithm, row.ranks),
    )


def share_of_cores(ranks: int, hardware: Hardware) -> float:
    """Number of ranks per core, at least 1, if `ranks` ranks run on one machine; 1 if each rank has its own device."""
    cores = hardware.measured.cores if hardware.measured else None
    return max(1.0, ranks / cores) if cores else 1.0


def measured_time(
    kind: str, size: float, ranks: int, stride: int, hardware: Hardware
) -> tuple[float, str] | None:
    """Seconds and algorithm of a collective, as measured on groups with the same number of ranks and the same stride.

    If no such group was measured, the most similar one is used: that with the nearest number of ranks, then with the
    nearest stride. Its latency and bytes are scaled by the algorithm's number of messages and of sent bytes. Returns
    None if the collective was never measured.
    """
    rows = (
        []
        if hardware.measured is None
        else [row for row in hardware.measured.collectives if row.kind == kind and row.axis != "control"]
    )
    if not rows:
        return None
    best = min(rows, key=lambda row: (abs(row.ranks - ranks), row.stride != stride, abs(row.stride - stride)))
    alike = [row for row in rows if (row.ranks, row.stride, row.axis) == (best.ranks, best.stride, best.axis)]
    fits = [row for row in alike if row.most_bytes is None or size * ranks <= row.most_bytes * row.ranks]
    return min(_scaled(row, size, ranks) for row in fits[:1] or alike[-1:])


def _scaled(row: MeasuredCollective, size: float, ranks: int) -> tuple[float, str]:
    latency, slope = per_message(row)
    kind, algorithm = row.kind, row.algorithm
    seconds = latency * messages(kind, algorithm, ranks) + size * slope * sent(kind, algorithm, ranks)
    return seconds, algorithm
