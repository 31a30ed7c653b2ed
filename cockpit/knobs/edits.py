"""What is chosen on the knob board: a row, a value being typed, and the changes that are marked. Textual-free."""

from collections.abc import Sequence

from agents.protocol import KnobState, Value
from cockpit.knobs import values as knobs

TYPED = 24  # longest value that may be typed


class Edits:
    """The choice of one person at one board, of which the rows are handed in: they change under the hand."""

    def __init__(self) -> None:
        self.row = 0
        self.typed = ""
        self.values: dict[str, Value] = {}
        self.base: int | None = None  # the revision at the first mark: a faster operator refuses this one

    def chosen(self, rows: Sequence[KnobState]) -> KnobState:
        """The row with the cursor; there must be one."""
        return rows[min(self.row, len(rows) - 1)]

    def mark(self, knob: KnobState, value: Value, revision: int) -> None:
        """`value` is to be proposed; the one in force takes the mark away."""
        if not self.values:
            self.base = revision
        if same(value, knob.value):
            self.values.pop(knob.name, None)
        else:
            self.values[knob.name] = value

    def turn(self, rows: Sequence[KnobState], by: int, revision: int) -> None:
        """The next legal value, or the one before."""
        knob = self.chosen(rows)
        self.typed = ""
        self.mark(knob, knobs.step(knob, self.values.get(knob.name, knob.value), by), revision)

    def type(self, letter: str) -> None:
        if len(self.typed) < TYPED:
            self.typed += letter

    def take(self, rows: Sequence[KnobState], revision: int) -> str:
        """What was typed becomes a mark; else one sentence why it cannot."""
        if not self.typed or not rows:
            return ""
        knob = self.chosen(rows)
        value = knobs.fit(knob, knobs.parse(self.typed))
        refusal = knob.refusal(value)
        if refusal:
            return refusal
        self.mark(knob, value, revision)
        self.typed = ""
        return ""

    def meant(self, rows: Sequence[KnobState]) -> dict[str, Value]:
        """What would be proposed now: the marks, and what is being typed if it is legal so far."""
        here = {knob.name for knob in rows}
        marked = {name: value for name, value in self.values.items() if name in here}
        if not self.typed or not rows:
            return marked
        knob = self.chosen(rows)
        value = knobs.fit(knob, knobs.parse(self.typed))
        if knob.refusal(value):
            return marked
        others = {name: to for name, to in marked.items() if name != knob.name}
        return others if same(value, knob.value) else {**others, knob.name: value}

    def taken(self) -> dict[str, Value]:
        """The marks, which are none any more."""
        values, self.values = self.values, {}
        return values

    def drop(self) -> bool:
        """Forget what is typed and marked; False if there was nothing."""
        had = bool(self.typed or self.values)
        self.typed = ""
        self.values = {}
        return had


def same(one: Value, other: Value) -> bool:
    """1 is 1.0, and neither is true."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)
