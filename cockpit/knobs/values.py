"""Values of knobs: parsing, legal values, the next value, and formatting."""

import math
import re

from agents.protocol import Board, KnobState, Value, spell
from cockpit.data import format

_WORDS: dict[str, Value] = {"none": None, "true": True, "false": False}
_INTEGER = re.compile(r"[+-]?\d{1,18}")
_DECIMAL = re.compile(r"[+-]?(\d{1,18}\.?\d{0,18}|\.\d{1,18})([eE][+-]?\d{1,3})?")
LONGEST = 200  # maximum length of a name or a value, in characters; no knob needs more
TRIAL_STEPS = 30  # default number of steps that a trial measures before the change, and again after it
_STOPS = (0.0, 0.1, 0.2, 0.5, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0, 8.0, 10.0, 20.0, 50.0, 100.0)


def parse(text: str) -> Value:
    """Parse a typed value such as ``none``, ``true``, ``8`` or ``1.25``; anything else is a string."""
    text = text.strip()
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _DECIMAL.fullmatch(text) and math.isfinite(number := float(text)):
        return number + 0.0  # converts -0.0 to 0.0
    return text


def fit(knob: KnobState, value: Value) -> Value:
    """`value`, converted if the knob needs another type: 1 becomes 1.0, 8.0 becomes 8, and None becomes "none"."""
    if knob.legal.admits(value):
        return value
    other: Value = value
    if value is None:
        other = "none"
    elif isinstance(value, int) and not isinstance(value, bool):
        other = float(value)
    elif isinstance(value, float) and value.is_integer():
        other = int(value)
    return other if knob.legal.admits(other) else value


def split_change(text: str) -> tuple[str, Value]:
    """Split a typed ``name=value``. Raises ValueError, whose message is one sentence, if `text` does not have this
    form."""
    name, equals, word = text.partition("=")
    if not equals or not name.strip() or not word.strip():
        raise ValueError(f"{text} is not a change; write it as knob=value, for instance micro_batches=8")
    if len(name) > LONGEST or len(word) > LONGEST:
        raise ValueError(
            f"{text[:40]}… is too long; a knob's name and value have at most {LONGEST} characters"
        )
    return name.strip(), parse(word)


def candidates(knob: KnobState) -> list[Value]:
    """Values that the arrow keys step through: all choices, or the current value and round values of a range."""
    legal = knob.legal
    values: list[Value] = list(legal.choices)
    if legal.low is not None and legal.high is not None:
        stops = {legal.low, legal.high, *(stop for stop in _STOPS if legal.low <= stop <= legal.high)}
        if isinstance(knob.value, int | float) and not isinstance(knob.value, bool):
            stops = {stop for stop in stops if stop != knob.value} | {knob.value}
        values += sorted(stops)
    if legal.optional and None not in values:
        values.append(None)
    return values


def step(knob: KnobState, value: Value, by: int) -> Value:
    """Another candidate value. `by`: the distance from `value` in the list of candidates, negative for an earlier
    candidate; beyond an end of the list, the result is the candidate at this end. If `value` is not in the list, the
    result is the first candidate; if the list is empty, `value`."""
    values = candidates(knob)
    if not values:
        return value
    at = next((i for i, known in enumerate(values) if known == value and type(known) is type(value)), None)
    return values[0] if at is None else values[max(0, min(len(values) - 1, at + by))]


def only_value(knob: KnobState) -> Value:
    """The only legal value of an action; None for other knobs, and for actions with several legal values."""
    one = knob.action and len(knob.legal.choices) == 1 and knob.legal.low is None and not knob.legal.optional
    return knob.legal.choices[0] if one else None


def value_knobs(board: Board | None) -> list[KnobState]:
    """The knobs whose value comes from a list or a range; actions and text knobs are left out."""
    return [knob for knob in board.knobs if not knob.action and not knob.legal.form] if board else []


def text_knobs(board: Board | None) -> list[KnobState]:
    """The knobs whose value is a string with a format of its own, such as `layout`. Such a string is too long for a row
    on the screen, so these knobs are changed by commands."""
    return [knob for knob in board.knobs if knob.legal.form] if board else []


def actions(board: Board | None) -> list[KnobState]:
    """The actions of a knob board, such as `save`. Unlike a knob, an action has no value in force: it runs once per
    request."""
    return [knob for knob in board.knobs if knob.action] if board else []


def value_text(knob: KnobState) -> str:
    """The value in force as text; an action has none."""
    return format.MISSING if knob.action else format.knob(knob.value)


def change_text(knob: KnobState, to: Value) -> str:
    """A change as text, such as ``micro_batches 4→8`` or, for an action, ``save`` or ``expert_placement load``."""
    if not knob.action:
        return f"{knob.name} {format.change(knob.value, to)}"
    return knob.name if only_value(knob) == to else f"{knob.name} {format.knob(to)}"


def legal_text(knob: KnobState) -> str:
    """The legal values as text, such as ``2 4 8 16`` or ``0.1 .. 8 | none``; for a text knob, the text's format."""
    legal = knob.legal
    if only_value(knob) is not None:
        return "done once"
    if legal.form:
        return legal.form
    words = [" ".join(spell(choice) for choice in legal.choices)] if legal.choices else []
    if legal.low is not None and legal.high is not None:
        words.append(f"{spell(legal.low)} .. {spell(legal.high)}")
    if legal.optional and None not in legal.choices:
        words.append("none")
    return " | ".join(words)


NEUTRAL = {True: "loss-neutral", False: "changes the loss"}


def effect_text(knob: KnobState) -> str:
    """The kind of effect that a change of the knob has: the text ``loss-neutral``, ``changes the loss``, ``ends the
    run`` or ``action``."""
    if knob.ends:
        return "ends the run"
    return "action" if knob.action else NEUTRAL[knob.loss_neutral]
