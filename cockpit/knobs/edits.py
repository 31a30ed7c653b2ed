"""Edits on the knob board: the selected row, the text being typed, and the chosen changes."""

from collections.abc import Sequence

from agents.protocol import KnobState, Value
from cockpit.knobs import values

TYPED = 24  # maximum length of a typed value, in characters


class Edits:
    """The user's edits on the knob board that are not sent yet. Methods take the current knobs as an argument, because
    the board may change while the user edits."""

    def __init__(self) -> None:
        self.row = 0
        self.typed = ""
        self.changes: dict[str, Value] = {}
        # revision at the first edit: the hub refuses the proposal if a newer one is in force
        self.base: int | None = None

    def selected(self, rows: Sequence[KnobState]) -> KnobState:
        """The row under the cursor; `rows` must not be empty."""
        return rows[min(self.row, len(rows) - 1)]

    def set(self, knob: KnobState, value: Value, revision: int) -> None:
        """Set `knob` to `value`. If `value` is already in force, remove the edit."""
        if not self.changes:
            self.base = revision
        if same(value, knob.value):
            self.changes.pop(knob.name, None)
        else:
            self.changes[knob.name] = value

    def next_value(self, rows: Sequence[KnobState], by: int, revision: int) -> None:
        """Step the selected knob through its list of candidate values: forward, or backward if `by` is negative."""
        knob = self.selected(rows)
        self.typed = ""
        self.set(knob, values.step(knob, self.changes.get(knob.name, knob.value), by), revision)

    def type(self, character: str) -> None:
        """Append `character` to the typed text, unless the text has its maximum length."""
        if len(self.typed) < TYPED:
            self.typed += character

    def accept_typed(self, rows: Sequence[KnobState], revision: int) -> str:
        """Convert the typed text to an edit. Return why the value is not legal, or ""."""
        if not self.typed or not rows:
            return ""
        knob = self.selected(rows)
        value = values.fit(knob, values.parse(self.typed))
        refusal = knob.refusal(value)
        if refusal:
            return refusal
        self.set(knob, value, revision)
        self.typed = ""
        return ""

    def pending(self, rows: Sequence[KnobState]) -> dict[str, Value]:
        """The changes that a proposal would contain now, including the typed value if it is legal."""
        names = {knob.name for knob in rows}
        changes = {name: value for name, value in self.changes.items() if name in names}
        if not self.typed or not rows:
            return changes
        knob = self.selected(rows)
        value = values.fit(knob, values.parse(self.typed))
        if knob.refusal(value):
            return changes
        others = {name: to for name, to in changes.items() if name != knob.name}
        return others if same(value, knob.value) else {**others, knob.name: value}

    def discard(self) -> bool:
        """Discard the typed text and all changes; return False if there was nothing to discard."""
        had = bool(self.typed or self.changes)
        self.typed = ""
        self.changes = {}
        return had


def same(one: Value, other: Value) -> bool:
    """Whether two values are equal. 1 equals 1.0, but neither equals true."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)
