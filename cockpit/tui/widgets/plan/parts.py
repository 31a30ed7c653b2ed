"""Text that several panels of the plan screen show: why the planner has no prediction for the run, memory sizes, and
signed differences between predictions."""

from typing import TYPE_CHECKING

from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.quantities import bytes_of
from cockpit.knobs.plan.model import WhatIf
from cockpit.tui.drawing.guide import Guide, guide_lines
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import Palette
from engine.config.layout import Layout

if TYPE_CHECKING:
    from cockpit.knobs.plan.outlook import Outlook

COMPUTING = "computing"
ELSEWHERE = "no plan of this run: the what-if says why"
NEEDS = "the planner needs the layout.toml of the run's folder, on this machine"
_GUIDE = Guide(
    "This screen shows the planned memory of each rank beside its device's memory, what a change of a setting would "
    "bring, and what bounds the run.",
    (
        ("engine run", "writes the layout.toml; on another machine, open the cockpit there"),
        ("your own loop", "while it runs, cockpit try measures what a change of its knobs brings"),
        ("without a run", "engine plan LAYOUT predicts memory and times"),
    ),
)


def without_plan(
    model: WhatIf, width: int, height: int, colours: Palette, brief: bool = False
) -> list[StripLine] | None:
    """Lines that say why the planner has no prediction for this run and, if there is room, what to do; None if it has
    one. With `brief`, the lines do not give the reason, but refer to the what-if panel."""
    layout = model.layout()
    if isinstance(layout, Layout):
        return None
    if layout is None:
        return [
            StripLine().add(f"{format.MISSING} {COMPUTING}: reading the layout of the run", colours.faint)
        ]
    if brief:
        return guide_lines(ELSEWHERE, _GUIDE, width, 0, colours)
    return guide_lines(f"no plan: {format.clean(layout.refusal)} · {NEEDS}", _GUIDE, width, height, colours)


def verdict(outlook: "Outlook", width: int, colours: Palette) -> StripLine:
    """A line that says whether the memory predicted by the planner fits into the device, such as
    ``✓ fits: 64 GiB of 80, pipeline rank 2, activations 41``. Parts that do not fit in `width` cells are left out."""
    memory, line = outlook.memory, StripLine()
    if outlook.capacity is None:
        peak, rank = size(memory.peak).strip(), memory.worst_rank
        parts = [f"{peak} on pipeline rank {rank}", "; the device's memory is not known"]
        mark, style = StripLine().add(f"{format.MISSING} ", colours.text), colours.text
    else:
        level = Level.GOOD if outlook.fits else Level.BAD
        first, *more = memory.sentence(outlook.capacity).split(", ")
        parts = [first, *(f", {part}" for part in more)]
        mark = line.add(f"{level.value} ", colours.level[level])
        style = colours.strong if outlook.fits else colours.level[level]
    return mark.add_fitting(width, *([(part, style)] for part in parts))


def above_peak(now: "Outlook", machine: str, width: int, colours: Palette) -> list[StripLine]:
    """A warning if measured steps are faster than the machine's peak FLOP/s allows, because the plan then assumes the
    wrong hardware or the wrong amount of work. Otherwise empty. `now`: the predictions for the run with its current
    settings."""
    if not now.mfu or now.mfu <= 1:
        return []
    text = f"{Level.WARN.value} steps are faster than the peak of {machine} allows: the plan assumes other hardware"
    return [
        StripLine().add(f"  {line}", colours.level[Level.WARN])
        for line in format.wrapped(text, max(20, width - 2), subsequent_indent="  ")
    ]


def size(value: float, digits: int = 5) -> str:
    """A size such as `` 52.1 GiB``, with the number right-aligned."""
    number, unit = bytes_of(value)
    return f"{number:>{digits}} {unit}"


def signed_size(value: float) -> str:
    """A difference of sizes, such as ``-13.2 GiB``."""
    number, unit = bytes_of(abs(value))
    return f"{'-' if value < 0 else '+'}{number} {unit}"


def change_text(before: float, low: float, high: float, digits: int = 1) -> str:
    """A change as an interval in percent, such as ``-8.1 .. -6.2 %``."""
    ends = [format.signed(100 * (end / before - 1), digits) for end in (low, high)]
    return f"{ends[0]} %" if ends[0] == ends[1] else f"{ends[0]} .. {ends[1]} %"
