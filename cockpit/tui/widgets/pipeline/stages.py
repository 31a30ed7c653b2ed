"""Panel with the bubble of each stage and the bubble's lower bound. Without a pipeline, the panel shows the median and
the highest time of each phase over all ranks."""

import math

from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.history.metric_table import PHASE
from cockpit.data.history.phases import StepPhases
from cockpit.data.history.rank_values import BOUND, BUBBLE, IDLE, OWN, STEP
from cockpit.data.pipeline.pipelines import UNEVEN, stage_count, typical_of
from cockpit.data.pipeline.step_comparison import name_of, phases_at
from cockpit.data.store import Store, Topic
from cockpit.tui.drawing.strips import StripLine, bar, named
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.keys.screen_bindings import STEPS
from cockpit.tui.session import Selection
from cockpit.tui.widgets.panel import Panel
from cockpit.tui.widgets.pipeline.timeline import shown_step
from cockpit.tui.widgets.pipeline.verdict import FINE_MS, wrapped

BARS = 12  # cells of the bar of a bubble


class StagesPanel(Panel):
    """The panel with the idle time of each stage, split into the part that the schedule causes, further waiting for
    other stages, and overhead."""

    TOPICS = frozenset({Topic.RANKS, Topic.PIPELINE, Topic.GRID})
    TITLE = "Stages"
    OPENS = "plan"
    ACTIONS = STEPS
    NATURAL = True
    EVERY = 4
    HELP = (
        "The bubble is the share of the pipeline window in which a rank runs no action; bound is the mean share over "
        "all stages that the schedule cannot avoid, so a stage with more work than the others can be below it. The "
        "bubble is split into schedule (idle even without any delay), wait (further waiting for other stages) and "
        "overhead. Values are medians over the ranks of a stage. Work is forward and backward. A "
        "stage that works more than 10 % longer than the median stage is marked and named, because all stages wait for "
        "it. Without a pipeline, the panel shows each phase over all ranks, with the rank for which it took longest."
    )

    def __init__(self, id: str, selection: Selection) -> None:
        super().__init__(id)
        self.selection = selection

    def choice(self) -> object:
        return self.selection.step

    def _phases(self, store: Store) -> StepPhases | None:
        return phases_at(store, shown_step(store, self.selection))

    def title(self, store: Store) -> str:
        found = self._phases(store)
        name = "Stages · work in ms, idle in %" if stage_count(store) > 1 else "Phases over all ranks"
        return f"{name} · step {format.grouped(found.step)}" if found else name

    def subtitle(self, store: Store) -> str:
        found = self._phases(store)
        return f"{format.grouped(found.ranks)}/{format.counted(store.world, 'rank')}" if found else ""

    def natural_height(self, store: Store) -> int:
        found = self._phases(store)
        if found is None:
            return 1
        if stage_count(store) < 2:
            return 1 + sum(name in (OWN, STEP) or name.startswith(PHASE) for name in found.spreads)
        return len(found.stages) + 3

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        found = self._phases(store)
        if found is None:
            step = shown_step(store, self.selection)
            return [StripLine().add(f"{format.MISSING} step {format.grouped(step)} is not kept", colours.dim)]
        if stage_count(store) < 2:
            return _over_ranks(store, found, colours)[:height]
        return _by_stage(found, width, height, colours)


def _by_stage(found: StepPhases, width: int, height: int, colours: Palette) -> list[StripLine]:
    parts = [name for name in found.spreads if name.startswith(IDLE)]
    head = StripLine().add(f"{'':<4}{'work':>7} {'uneven':>7}{'bubble':>8}{'bound':>6}", colours.dim)
    widths = [max(5, len(name_of(name)) + 1) for name in parts]
    for name, cells in zip(parts, widths, strict=True):
        head.add(f"{name_of(name)[: cells - 1]:>{cells}}", colours.dim)
    wide = width >= head.width + 2 + BARS
    work = {stage: _work(found, stage) for stage in found.stages}
    middle = typical_of(ms for ms in work.values() if ms is not None)
    digits = 1 if middle is not None and middle < FINE_MS else 0
    lines, over = [], []
    for stage in found.stages:
        ms = work[stage]
        excess = ms / middle - 1 if ms is not None and middle else None
        slow = excess is not None and excess > UNEVEN
        if slow and excess is not None:
            over.append((excess, stage))
        line = StripLine().add(f"pp{stage}".ljust(4), colours.text)
        line.add(format.fixed(ms, 7, digits), colours.text)
        text = format.MISSING if excess is None else format.excess(excess)
        line.add(f"{text:>7}{'!' if slow else ' '}", colours.level[Level.WARN] if slow else colours.dim)
        bubble = _percent(found, BUBBLE, stage)
        line.add(format.fixed(bubble, 8), colours.text)
        line.add(format.fixed(_percent(found, BOUND, stage), 6), colours.dim)
        for name, cells in zip(parts, widths, strict=True):
            line.add(format.fixed(_percent(found, name, stage), cells), colours.dim)
        if wide and bubble is not None:
            line.add("  ", colours.dim).add(bar(bubble / 100, BARS), colours.faint)
        lines.append(line)
    foot = _uneven(over, len(found.stages), width, colours)
    if len(lines) + 1 + len(foot) > height:
        foot = [StripLine().add("only the stages that work longest are shown", colours.dim), *foot]
    room = max(1, height - 1 - len(foot))
    if len(lines) > room:  # the stages that work longest stay visible
        order = sorted(range(len(lines)), key=lambda at: -(work[found.stages[at]] or 0.0))[:room]
        lines = [lines[at] for at in sorted(order)]
    return [head, *lines, *foot]


def _uneven(over: list[tuple[float, int]], stages: int, width: int, colours: Palette) -> list[StripLine]:
    if not over:
        text = (
            f"none of the {stages} stages works more than {100 * UNEVEN:.0f} % longer than the median stage"
        )
        return wrapped(Level.GOOD.value, text, width, colours.level[Level.GOOD], colours)
    excess, stage = max(over)
    more = f" and {len(over) - 1} more" if len(over) > 1 else ""
    text = f"stage pp{stage}{more} works {100 * excess:.0f} % longer than the median stage: the others wait"
    return wrapped(Level.WARN.value, text, width, colours.level[Level.WARN], colours)


def _work(found: StepPhases, stage: int) -> float | None:
    """The median forward time plus the median backward time of a stage; None if either is unknown."""
    spreads = [found.spread(PHASE + name, stage) for name in ("forward", "backward")]
    return sum(one.median for one in spreads) if all(one.known for one in spreads) else None


def _percent(found: StepPhases, name: str, stage: int) -> float | None:
    spread = found.spread(name, stage)
    # Rounding may leave a negative zero.
    return None if math.isnan(spread.median) else round(100 * spread.median, 1) + 0.0


def _over_ranks(store: Store, found: StepPhases, colours: Palette) -> list[StripLine]:
    lines = [StripLine().add(f"{'ms':<16}{'median':>8}{'highest':>9}{'over':>7}  rank", colours.dim)]
    for name in found.spreads:
        if name not in (OWN, STEP) and not name.startswith(PHASE):
            continue
        spread = found.spread(name, found.stages[0])
        if not spread.known:
            continue
        excess = spread.worst / spread.median - 1 if spread.median else 0.0
        slow = name == OWN and excess > UNEVEN
        title = {OWN: "own time", STEP: "step"}.get(name, name_of(name))
        line = StripLine().add(f"{named(title, 16)}{spread.median:8.0f}{spread.worst:9.0f}", colours.text)
        mark = "! " if slow else "  "
        line.add(format.excess(excess).rjust(7) + mark, colours.level[Level.WARN] if slow else colours.dim)
        lines.append(line.add(store.name(spread.rank), colours.dim))
    return lines
