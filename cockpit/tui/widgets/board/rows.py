"""The upper part of the knob board: one row per knob, then the actions side by side under a heading."""

from collections.abc import Sequence
from typing import NamedTuple

from agents.protocol import KnobState
from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.knobs import values as knobs
from cockpit.knobs.edits import Edits
from cockpit.tui.drawing.strips import StripLine, rule
from cockpit.tui.drawing.theme import Palette

VALUES = ((92, 26), (66, 19), (0, 13))  # (minimum board width, columns for the value)
LEGAL, LEAST_LEGAL = 32, 9
EFFECT = 17
BETWEEN = 3  # columns between two actions
LONGEST_ABOUT = 3  # lines


def knob_rows(
    held: Sequence[KnobState], cursor: int, edits: Edits, height: int, width: int, colours: Palette
) -> list[StripLine]:
    """The rows around the cursor that fit in `height` lines. Arrows mark hidden rows above and below."""
    at = min(cursor, len(held) - 1)
    top = max(0, min(at - height // 2, len(held) - height))
    columns = _columns(held, width)
    return [
        _knob_row(knob, i == cursor, _more(i, top, height, len(held)), columns, edits, colours)
        for i, knob in list(enumerate(held))[top : top + height]
    ]


class Columns(NamedTuple):
    """Column positions in the table of knobs: where the value and the legal values begin, and the width of the legal
    values."""

    value: int
    legal: int
    room: int


def _columns(held: Sequence[KnobState], width: int) -> Columns:
    value = max((len(knob.name) for knob in held), default=0) + 4
    legal = value + next(columns for least, columns in VALUES if width >= least)
    room = min(LEGAL, width - legal - EFFECT - 1)
    return Columns(value, legal, room if room >= LEAST_LEGAL else 0)


def _more(i: int, top: int, height: int, count: int) -> str:
    """The scroll arrow in front of row `i`: ↑ on the first visible row if rows above it are hidden, ↓ on the last
    visible row if rows below it are hidden, otherwise blank."""
    if i == top > 0:
        return "↑ "
    return "↓ " if i == top + height - 1 < count - 1 else "  "


def _knob_row(
    knob: KnobState, here: bool, more: str, at: Columns, edits: Edits, colours: Palette
) -> StripLine:
    """The row of one knob, such as ``▌ micro_batches  4 → 8   2 4 8 16   loss-neutral``."""
    line = StripLine().add("▌ " if here else more, colours.accent if here else colours.faint)
    line.add(knob.name, colours.strong if here else colours.text).pad_to(at.value, colours.text)
    value = knobs.value_text(knob)
    if here and edits.typed:
        line.add(f"{value} → ", colours.dim).add(f"{edits.typed}▏", colours.cursor)
    elif knob.name in edits.changes:
        line.add(f"{value} → ", colours.dim).add(f" {format.knob(edits.changes[knob.name])} ", colours.cursor)
    else:
        line.add(value, colours.strong if here else colours.text)
    line.pad_to(at.legal, colours.text)
    legal = knobs.legal_text(knob)
    line.add(legal if len(legal) <= at.room else f"{legal[: at.room - 1]}…" if at.room else "", colours.dim)
    line.pad_to(at.legal + at.room, colours.text)
    neutral = colours.dim if knob.loss_neutral else colours.level[Level.WARN]
    return line.add(f" {knobs.effect_text(knob)}", neutral if here else colours.dim)


# --------------------------------------------------------------------------------------------- actions


def strip_height(actions: Sequence[KnobState], width: int) -> int:
    """The height of the actions and their heading. The height does not depend on edits, so the lines below do not
    move."""
    return 1 + len(_wrapped(actions, width)) if actions else 0


def action_strip(
    actions: Sequence[KnobState], cursor: int, edits: Edits, width: int, colours: Palette
) -> list[StripLine]:
    """Lines with the actions under a heading. `cursor`: index of the selected action; out of range if no action is
    selected."""
    if not actions:
        return []
    lines = [rule("Actions", width, colours.dim, colours.line)]
    at = 0
    for row in _wrapped(actions, width):
        line = StripLine()
        for knob in row:
            line.add(" ", colours.text)
            here = at == cursor
            text = f"▌{knob.name}" if here else f" {knob.name}"
            chosen = f"{edits.typed}▏" if here and edits.typed else ""
            if knob.name in edits.changes and not chosen:
                chosen = format.knob(edits.changes[knob.name]) if knobs.only_value(knob) is None else "✓"
            style = colours.level[Level.WARN] if knob.ends else colours.text
            line.add(text, colours.cursor if here else style)
            if chosen:
                line.add(" → ", colours.dim).add(f" {chosen} ", colours.cursor)
            line.add(" " * (BETWEEN - 1), colours.text)
            at += 1
        lines.append(line)
    return lines


def _room(knob: KnobState) -> int:
    """The width of an action's name together with its longest legal value."""
    values = (
        [] if knobs.only_value(knob) is not None else [format.knob(value) for value in knob.legal.choices]
    )
    chosen = len(" →  ") + 1 + max(map(len, values)) if values else 0
    return len("▌") + len(knob.name) + chosen + BETWEEN - 1


def _wrapped(actions: Sequence[KnobState], width: int) -> list[list[KnobState]]:
    rows: list[list[KnobState]] = [[]]
    used = 0
    for knob in actions:
        if rows[-1] and used + 1 + _room(knob) > width:
            rows.append([])
            used = 0
        rows[-1].append(knob)
        used += 1 + _room(knob)
    return rows


# ---------------------------------------------------------------------------------------- explanations


def about_lines(knob: KnobState, held: Sequence[KnobState], width: int) -> list[str]:
    """The explanation of a knob or action, in lines. The text of an action begins with its name and legal values. The
    text of a knob begins with its legal values if the row has no room for them."""
    text, legal = format.clean(knob.about), format.clean(knobs.legal_text(knob))
    if knob.action:
        text = f"{format.clean(knob.name)} ({legal}) · {text}"
    elif len(legal) > _columns(held, width).room:
        text = f"{legal} · {text}"
    return format.wrapped(text, max(20, width - 4))


def about_height(rows: Sequence[KnobState], held: Sequence[KnobState], width: int) -> int:
    """The height of the longest explanation. The board always reserves this height, so that no line moves when the
    cursor moves."""
    return min(LONGEST_ABOUT, max((len(about_lines(knob, held, width)) for knob in rows), default=0))
