"""Lines that compare a step with the usual step (medians over the kept steps): a one-sentence summary, the events at
the step, and a table of its times."""

from rich.style import Style

from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.history.rank_values import OWN, WAIT
from cockpit.data.pipeline.pipelines import longest, pipelines, stage_count
from cockpit.data.pipeline.step_comparison import (
    Comparison,
    Growth,
    compare,
    happened,
    name_of,
    phases_at,
    step_times,
    verdict,
)
from cockpit.data.store import Store
from cockpit.tui.drawing.strips import StripLine, named
from cockpit.tui.drawing.theme import Palette

GREW = 0.15  # a row is marked if its time grows by at least this share of the step's growth
NEGLIGIBLE_MS = 0.05
FINE_MS = 100.0  # times of shorter steps are shown with a decimal
STILL = 0.01  # a row is dim if its growth is below this share of the step


def verdict_lines(store: Store, step: int | None, width: int, colours: Palette) -> list[StripLine]:
    """The lines of a one-sentence summary of a step, which says how long the step took and which of its times grew,
    compared with the usual step."""
    found = compare(store, step)
    if step is None:
        return []
    name = f"step {format.grouped(step)}"
    if found is None:
        return wrapped(format.MISSING, _why_not(store, step), width, colours.dim, colours)
    level = Level.WARN if found.cause else Level.GOOD
    text = f"{name} took {format.duration_ms(found.phases.step_ms).strip()}, {verdict(found)}"
    return wrapped(level.value, text, width, colours.level[level], colours)


def _why_not(store: Store, step: int) -> str:
    """Why a step cannot be compared with the usual step, and how long the step took if that is known."""
    name = f"step {format.grouped(step)}"
    if phases_at(store, step):
        return f"{name}: too few steps are known to compare it with"
    ms = next((ms for at, ms in step_times(store) if at == step), None)
    oldest = next(iter(store.phases.steps), None)
    if ms is None:
        return f"{name} is not kept"
    took = f"{name} took {format.duration_ms(ms).strip()}; its phases are not kept"
    return f"{took}: the oldest kept is step {format.grouped(oldest)}" if oldest and step < oldest else took


def comparison_lines(store: Store, step: int, width: int, height: int, colours: Palette) -> list[StripLine]:
    """The lines below the summary of a step: notes about the step, and the table of its times."""
    lines: list[StripLine] = []
    for text in _evidence(store, step):
        lines += wrapped(format.MISSING, text, width, colours.accent, colours)
    found = compare(store, step)
    if found:
        lines += _table(store, found, width, height - len(lines), colours)
    return lines[: max(0, height)]


def wrapped(glyph: str, text: str, width: int, style: Style, colours: Palette) -> list[StripLine]:
    """`text` after a glyph, wrapped at `width`."""
    parts = format.wrapped(text, max(8, width - 2)) or [""]
    return [
        StripLine().add(f"{glyph} " if not number else "  ", style).add(part, colours.text)
        for number, part in enumerate(parts)
    ]


def _evidence(store: Store, step: int) -> list[str]:
    """Notes about a step, as far as they apply: the action in the timeline whose duration exceeds the median for its
    kind and stage by the most, the events at the step, and the slowest step of the run, if it took longer than this
    step but its phases are no longer in memory."""
    found = []
    for pipeline in pipelines(store, step)[:1]:
        if out := longest(pipeline):
            lane, action, over = out
            name = f"{action.kind}{action.micro_batch} of stage {action.stage}"
            ms = action.end_ms - action.start_ms
            found.append(
                f"in its timeline {name} ({lane.label}) took {ms:.0f} ms, {over:.0f} ms above its median"
            )
    found += happened(store, step)
    slower = [(ms, other) for other, ms in step_times(store) if other > 0]
    if slower:
        ms, other = max(slower)
        if other not in store.phases.steps and ms > (store.phases.time_ms(step) or 0.0):
            found.append(
                f"step {format.grouped(other)} took {format.duration_ms(ms).strip()}, the slowest of the run, "
                "but its phases are not kept"
            )
    return found


def _table(store: Store, found: Comparison, width: int, height: int, colours: Palette) -> list[StripLine]:
    grown_ms = found.phases.step_ms - found.usual.step_ms
    lines = [StripLine().add(f"{'ms':<16}{'step':>8}{'usual':>8}{'grew':>8}  where", colours.dim)]
    step = StripLine().add(f"{'step':<16}", colours.text)
    digits = 1 if found.usual.step_ms < FINE_MS else 0
    step.add(
        f"{found.phases.step_ms:8.{digits}f}{found.usual.step_ms:8.{digits}f}{format.signed(grown_ms, digits):>8}",
        colours.text,
    )
    lines.append(step)
    own = [one for one in found.growths if one.quantity == OWN]
    for growth in [*own, *(one for one in found.growths if one.quantity != OWN)]:
        if max(growth.ms, growth.usual_ms) < NEGLIGIBLE_MS:
            continue
        marked = bool(found.cause) and growth.grown_ms >= GREW * grown_ms
        still = abs(growth.grown_ms) < STILL * found.usual.step_ms
        plain = colours.dim if still else colours.text
        style = colours.level[Level.WARN] if marked else plain
        kind = "wait " if growth.quantity.startswith(WAIT) else ""
        name = "own time" if growth.quantity == OWN else kind + name_of(growth.quantity)
        line = StripLine().add(named(name, 16), plain)
        line.add(f"{growth.ms:8.{digits}f}{growth.usual_ms:8.{digits}f}", plain)
        line.add(f"{format.signed(growth.grown_ms, digits):>8}{'!' if marked else ' '} ", style)
        lines.append(line if still else line.add(_where(store, growth, width - line.width), colours.dim))
    return lines[:height] if height > 2 else []


def _where(store: Store, growth: Growth, room: int) -> str:
    """The stage or the rank whose time grew; the rank's coordinates are left out if they do not fit."""
    if growth.whole:
        return f"all of pp{growth.stage}" if stage_count(store) > 1 else "all ranks"
    name = store.name(growth.rank)
    return name if len(name) <= room else f"rank {growth.rank}"
