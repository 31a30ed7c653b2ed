"""Creates knobs from the declarations of a training program (`Loop.knob`), and checks the declarations."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from agents.protocol import KnobState, Legal, Value, spell
from agents.rank.knob_board import Knob

TYPES = (bool, int, float, str)

Fixed = Sequence[Value] | tuple[float, float] | None
Legals = Fixed | Callable[[], Fixed]
"""Legal values: a list of choices, or a pair (lowest, highest); optional for a bool. A function returns those in force,
if they change during the run."""


def declared_knob(
    name: str,
    type: type[Value],
    legal: Legals,
    value: Value,
    apply: Callable[[Any], None],
    loss_neutral: bool,
    about: str,
    waits: Callable[[Any], str] | None,
) -> tuple[Knob, Value]:
    """Create a knob from the arguments of `Loop.knob`, and convert its initial value to `type`. Raises ValueError if
    the declaration is invalid."""
    if type not in TYPES:
        raise ValueError(f"knob {name}: a {type.__name__} is not a knob's type; legal: bool, int, float, str")

    def allowed() -> Legal:
        return _allowed(name, type, legal() if callable(legal) else legal)

    refusal = KnobState(name, value, allowed(), loss_neutral).refusal(value)
    if refusal:
        raise ValueError(refusal)
    cast = partial(_cast, name, type)
    knob = Knob(name, lambda _: allowed(), loss_neutral, about, apply, lambda values: values[name], cast=cast)
    return (replace(knob, waits=waits) if waits else knob), cast(value)


def _cast(name: str, type: Callable[[Any], Value], value: Value) -> Value:
    """Convert a value to the type of its knob: 1 to 1.0 for a float knob, 1.0 to 1 for an int knob. Raises ValueError
    if the conversion would change the value, as with 1.5 for an int knob.
    """
    if type is int and isinstance(value, float) and not value.is_integer():
        raise ValueError(f"{name} = {spell(value)} is not legal; it takes whole numbers")
    return type(value)


def _allowed(name: str, type: type[Value], legal: Fixed) -> Legal:
    if legal is None and type is bool:
        return Legal([False, True])
    if isinstance(legal, tuple) and len(legal) == 2 and type in (int, float):
        return Legal(low=float(legal[0]), high=float(legal[1]))  # type: ignore[arg-type]
    if not legal or not all(isinstance(choice, type) for choice in legal):
        raise ValueError(
            f"knob {name}: legal= takes a list of choices of type {type.__name__}, or a pair (lowest, highest) of "
            "numbers"
        )
    return Legal(list(legal))
