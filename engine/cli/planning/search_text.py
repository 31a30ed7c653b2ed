"""Formats the result of a search as text of at most 80 columns."""

from collections.abc import Iterator
from textwrap import wrap

from engine.cli.planning.plan_text import folded, scaled, seconds
from engine.planner.search.explain import Neighbour
from engine.planner.search.order import limits
from engine.planner.search.search import Found, Result
from engine.planner.search.space import Choice

COLUMNS, INDENT = 80, 34
AGAIN = {"none": "", "selective": " sel", "full": " full"}  # recompute


def search_text(path: str, ranks: int, found: Result, around: list[Neighbour]) -> str:
    return "\n".join(_lines(path, ranks, found, around)) + "\n"


def _lines(path: str, ranks: int, found: Result, around: list[Neighbour]) -> Iterator[str]:
    counts = found.counts
    layout = found.layout
    yield f"{layout.run.name} on {ranks:,} x {found.hardware.name}, {layout.train.precision}, {_batch(found)}"
    large = counts.get("too large by the bound", 0) + counts.get("too large", 0)
    yield (
        f"{counts['considered']:,} layouts considered, {large:,} too large, "
        f"{counts.get('planned', 0):,} planned in full"
    )
    yield ""
    if not found.best:
        yield from _nothing(found)
        return
    yield f"{'':2} {'step':>8} {'tok/s':>7} {'MFU':>6} {'GiB':>5}  grid · schedule · settings"
    for number, one in enumerate(found.best, 1):
        yield f"{number:<2} {_row(one)}"
    yield ""
    if found.tied > 1:
        yield from wrap(_uncertain(found), COLUMNS)
    yield from wrap(_bound(found.best[0]), COLUMNS)
    yield "Changes to the first:"
    for neighbour in around:
        yield _cut(f"  {neighbour.change:20} {neighbour.why}")
    yield ""
    yield from _command(path, found)


def _uncertain(found: Result) -> str:
    """One sentence that says which results may be the fastest, and how uncertain a predicted ratio of two step times
    is."""
    numbers = [str(number) for number, candidate in enumerate(found.candidates, 1) if candidate]
    known = limits()
    return (
        f"Any of {', '.join(numbers)} may be the fastest: a predicted ratio of two step times is known within a factor "
        f"of {known.same_split:.2f}, or of {known.other_split:.2f} if tp, cp, ep or the use of ZeRO 3 differ."
    )


def _batch(found: Result) -> str:
    layout = found.layout
    return f"{layout.train.global_batch:,} x {layout.model.seq_len:,} tokens a step"


def _bound(found: Found) -> str:
    assert found.plan.time
    return found.plan.time.bound_by[1]


def _row(found: Found) -> str:
    plan, time = found.plan, found.plan.time
    assert time
    gib = plan.memory.peak / 2**30
    tokens = scaled(time.tokens_per_s).replace(" ", "")
    return f"{seconds(found.seconds):>8} {tokens:>7} {100 * time.mfu:>4.1f} % {gib:>5.1f}  {described(found.choice)}"


def described(choice: Choice) -> str:
    """The grid, schedule and settings of a choice, such as ``dp16 pp8 tp2 · zbv · mb1 z1``."""
    data = str(choice.dp_shard) if choice.dp_replicate == 1 else f"{choice.dp_replicate}x{choice.dp_shard}"
    sizes = {"pp": choice.pp, "cp": choice.cp, "tp": choice.tp, "ep": choice.ep}
    axes = [f"dp{data}", *(f"{axis}{size}" for axis, size in sizes.items() if size > 1)]
    virtual = f" x{choice.virtual_stages}" if choice.virtual_stages > 1 else ""
    words = [" ".join(axes), *([f"{choice.schedule}{virtual}"] if choice.pp > 1 else [])]
    words.append(f"mb{choice.micro_batch} z{choice.zero}{AGAIN[choice.recompute]}")
    return folded(words, INDENT)


def _cut(line: str) -> str:
    return line if len(line) <= COLUMNS else f"{line[: COLUMNS - 1]}…"


def _nothing(found: Result) -> Iterator[str]:
    yield f"Nothing fits into {found.hardware.device.memory_bytes / 2**30:.0f} GiB a device."
    if found.nearest:
        plan = found.nearest.plan
        yield f"Least memory: {described(found.nearest.choice)}"
        yield f"  {plan.memory.sentence(plan.capacity or 0.0)}"


def _command(path: str, found: Result) -> Iterator[str]:
    """The `engine plan` command that shows the best choice in full."""
    words = ["engine plan", path, *found.best[0].choice.changes(found.layout)]
    if found.layout.hardware.name != found.hardware.name:
        words.append(f"--hardware {found.hardware.name}")
    lines = wrap(" ".join(words), COLUMNS - 2, break_long_words=False, break_on_hyphens=False)
    yield " \\\n  ".join(lines)
