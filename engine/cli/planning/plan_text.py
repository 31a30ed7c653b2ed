"""Formats a plan as text of at most 80 columns."""

from collections.abc import Iterator
from itertools import groupby
from textwrap import wrap

from engine.planner.memory.peak import RankMemory
from engine.planner.timing.step import Prediction
from engine.planner.what_if import UNKNOWN_TIME, WhatIf
from engine.planner.workload.parameters import active, total

COLUMNS, INDENT = 80, 11
GIB, MIB = 2**30, 2**20
UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
DURATIONS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
PARTS = {  # heading: components of memory
    "param": ("parameters", "gathered"),
    "grad": ("gradients",),
    "optim": ("optimizer",),
    "activ": ("activations",),
    "moe": ("moe",),
    "logits": ("logits",),
    "other": ("working", "pipeline", "framework", "checkpoint"),
}


def plan_text(name: str, found: WhatIf) -> str:
    """The plan as text: a description of the layout, the time of a step and its bottleneck, and the memory by rank."""
    return "\n".join([*_head(name, found), "", *_time(found), *_bytes(found), "", *_memory(found)]) + "\n"


def scaled(value: float, units: tuple[tuple[float, str], ...] = UNITS) -> str:
    """A number with three significant digits and a unit prefix, such as 3.35 T."""
    for size, letter in units:
        if abs(value) >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.3g} "


def seconds(value: float) -> str:
    """A time with three significant digits, such as 19.9 s or 1.2 ms."""
    size, unit = next((row for row in DURATIONS if value >= row[0]), DURATIONS[-1])
    return f"{value / size:.3g} {unit}" if value / size < 1000 else f"{value / size:,.0f} {unit}"


def shape(found: WhatIf) -> str:
    """The grid, the schedule and the settings of the layout."""
    job, grid = found.job, found.job.grid
    sizes = {"pp": grid.pp, "dp": grid.dp, "cp": grid.cp, "tp": grid.tp, "ep": grid.ep}
    axes = " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "one rank"
    stages = f" x{job.virtual_stages}" if job.virtual_stages > 1 else ""
    schedule = f"{job.schedule}{stages}, " if grid.pp > 1 else ""
    again = "+".join(job.recomputed) or job.recompute
    batches = f"{schedule}{job.micro_batches} micro-batches of {job.micro_batch}"
    return folded([axes, batches, f"zero {job.zero}", f"recompute {again}"], 0)


def _head(name: str, found: WhatIf) -> Iterator[str]:
    job, model = found.job, found.job.model
    size, used = total(model), active(model)
    parameters = f"{scaled(size, COUNTS)} parameters"
    if used != size:
        parameters += f", {scaled(used, COUNTS)} active"
    on = f" on {found.hardware.name}" if found.hardware else ""
    ranks = f"{job.grid.world:,} {'ranks' if job.grid.world > 1 else 'rank'}"
    yield folded([f"{name}: {parameters}", ranks + on, job.precision], 0)
    yield shape(found)
    yield f"{job.global_batch:,} sequence{'' if job.global_batch == 1 else 's'} of {job.seq_len:,} tokens a step"


def _time(found: WhatIf) -> Iterator[str]:
    time = found.time
    if time is None or found.hardware is None:
        yield f"time       {UNKNOWN_TIME}"
        return
    low, mid, high = time.step_s
    peak = found.hardware.device.peak
    of = "bf16" if found.job.precision in ("fp8", "nvfp4") else found.job.precision
    yield f"step       {seconds(mid)} ({seconds(low)} to {seconds(high)})"
    yield f"rate       {scaled(time.tokens_per_s)}tok/s · {time.tflops_per_device:,.3g} TFLOP/s a device"
    yield f"MFU        {100 * time.mfu:.1f} % of {scaled(peak[of])}FLOP/s (dense {of}, causal attention)"
    mean = " (mean over pipeline ranks; seconds: the slowest rank)"
    yield f"bubble     {100 * time.bubble:.1f} %{mean if found.job.grid.pp > 1 else ''}"
    yield "bound by   " + ("\n" + " " * INDENT).join(wrap(time.bound_by[1], COLUMNS - INDENT))
    yield "seconds    " + _phases(time)


def _bytes(found: WhatIf) -> Iterator[str]:
    sent = {axis: size for axis, size in found.bytes.items() if size >= 1}
    words = [f"{axis} {scaled(size)}B" for axis, size in sent.items()]
    yield f"sent       {folded([*words, 'a step, by rank 0'], INDENT) if words else 'nothing'}"
    if found.job.token_bytes:
        read = found.job.global_batch * (found.job.seq_len + 1) * found.job.token_bytes
        rate = f"{scaled(read / found.time.step_s[1])}B/s" if found.time else "unknown without a machine"
        yield f"data       {folded([f'{scaled(read)}B read a step, by all data ranks', rate], INDENT)}"


def _phases(time: Prediction) -> str:
    """The phases of a step, the longest first, without those that take less than a thousandth of the step."""
    mid = time.step_s[1]
    shown = sorted((-value, cause) for cause, value in time.phases.items() if value >= mid / 1000)
    return folded([f"{cause} {seconds(-value)}" for value, cause in shown], INDENT)


def folded(words: list[str], indent: int, columns: int = COLUMNS) -> str:
    """The words joined by ` · ` and wrapped; each line after the first is indented by `indent`."""
    lines = [""]
    for word in words:
        if lines[-1] and indent + len(lines[-1]) + len(word) + 3 > columns:
            lines.append("")
        lines[-1] += f"{' · ' if lines[-1] else ''}{word}"
    return ("\n" + " " * indent).join(lines)


def _memory(found: WhatIf) -> Iterator[str]:
    size, unit = (MIB, "MiB") if found.memory.peak < GIB else (GIB, "GiB")
    if found.capacity is None:
        peak, worst = _number(found.memory.peak / size), found.memory.worst_rank
        yield f"memory     {peak} {unit}, pipeline rank {worst}, without the memory of libraries"
    else:
        yield f"memory     {found.memory.sentence(found.capacity)}"
    if copy := found.memory.host_copy:
        yield f"           checkpoints are written from a copy of {_number(copy / size)} {unit} in a rank's host memory"
    yield ""
    yield f"{unit} by rank {'total':>8}" + "".join(f"{heading:>8}" for heading in PARTS)
    number = 0
    for row, same in groupby(_row(rank, size) for rank in found.memory.ranks):
        count = len(list(same))
        ranks = f"pp{number}" if count == 1 else f"pp{number} to {number + count - 1}"
        yield f"{ranks:<12}{row}"
        number += count


def _row(rank: RankMemory, size: int) -> str:
    parts = rank.components()
    cells = [rank.total, *(sum(parts[name] for name in names) for names in PARTS.values())]
    return "".join(f"{_number(cell / size):>8}" for cell in cells)


def _number(value: float) -> str:
    """A number with about three significant digits; numbers below 0.001 become 0."""
    if value < 0.001:
        return "0"
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:,.1f}"
