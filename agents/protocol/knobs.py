"""The knobs of the knob board, each with its value in force and its legal values."""

from typing import Annotated

from msgspec import Meta, Struct

from agents.protocol.base import FiniteValue, Name, Text, Value, spell


class Legal(Struct, array_like=True, frozen=True):
    """The legal values of a knob: one of `choices`, or a number in [low, high]; also `none` if `optional`. With `form`,
    any string is legal here, and the ranks check it; `form` describes the notation."""

    choices: Annotated[list[Value], Meta(max_length=256)] = []
    low: float | None = None
    high: float | None = None
    optional: bool = False
    form: Text = ""

    def __str__(self) -> str:
        words = [self.form] if self.form else [spell(choice) for choice in self.choices]
        if self.low is not None and self.high is not None:
            words.append(f"{spell(self.low)} to {spell(self.high)}")
        if self.optional:
            words.append("none")
        return ", ".join(words)

    def admits(self, value: Value) -> bool:
        if value is None:
            return self.optional
        if any(value == choice and type(value) is type(choice) for choice in self.choices):
            return True
        if self.form:
            return isinstance(value, str)
        if isinstance(value, bool | str) or self.low is None or self.high is None:
            return False
        return self.low <= value <= self.high


class KnobState(Struct, array_like=True, frozen=True, gc=False):
    """One knob of the knob board: its value in force, its legal values and its properties. `legal` depends on the other
    knobs and the layout."""

    name: Name
    value: FiniteValue
    legal: Legal
    loss_neutral: bool
    about: Text = ""
    action: bool = False  # setting this knob triggers its action once; the knob has no value
    ends: bool = False  # setting this knob ends the run; a screen asks for confirmation

    def refusal(self, value: Value) -> str | None:
        """Why `value` is not legal, in one sentence; None if it is legal."""
        if self.legal.admits(value):
            return None
        return f"{self.name} = {spell(value)} is not legal; legal: {self.legal}"
