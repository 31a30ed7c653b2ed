"""The knob board of a rank: the knobs and their legal values. A change is applied completely or not at all, unless the
program's own code fails while a knob is set.

A knob's legal values may depend on other knobs: the legal micro-batch counts depend on the schedule, for example. So
`check` covers all values that the board would have after the change. A change has two phases. `prepare` may refuse the
change, and builds what the new values need. `commit` only puts the new values into effect.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from agents.protocol import Changes, KnobState, Legal, Value

Values = Mapping[str, Value]
Prepared = list[tuple[Callable[[Any], None], Any]]
"""The `commit` of each changed knob, with the value that its `prepare` returned."""


class NotAppliedError(Exception):
    """The `commit` of a knob called the program's own code, which failed, so the knob keeps its value. The message
    names the knob and the reason.
    """


def _unchanged(value: Value) -> Value:
    return value


def _never(_: Any) -> str:
    return ""


@dataclass(frozen=True)
class Knob:
    """One knob.

    `legal` and `prepare` are called with the values that the board would have after the change. `prepare` returns what
    `commit` needs, or raises ValueError with a one-sentence message. `commit` must not raise any exception other than
    NotAppliedError, which it may raise only if it calls the program's own code.

    A knob that is an `action`, such as saving a checkpoint, has no value. Setting such a knob requests the action once;
    `commit` only records the request.

    `waits` is called with a legal new value. `waits` returns "" if the value can take effect before the next step. A
    loop may be able to switch the value only at certain steps; in this case `waits` returns the reason for the delay.
    Like `prepare`, `waits` may raise ValueError with a one-sentence message.
    """

    name: str
    legal: Callable[[Values], Legal]
    loss_neutral: bool
    about: str
    commit: Callable[[Any], None]
    prepare: Callable[[Values], Any]
    action: bool = False
    ends: bool = False  # the action ends the run
    # Converts a legal value; may raise ValueError with a sentence.
    cast: Callable[[Value], Value] = _unchanged
    waits: Callable[[Any], str] = _never


def action(name: str, about: str, do: Callable[[Any], None], ends: bool = False) -> Knob:
    """Create a knob that starts an action, such as saving a checkpoint, instead of holding a value. `ends` marks an
    action that ends the run."""
    return Knob(
        name, lambda _: Legal(choices=[True]), True, about, do, lambda _: None, action=True, ends=ends
    )


class KnobBoard:
    """The knobs of one rank and their values, which are equal on all ranks of a run."""

    def __init__(self, knobs: list[Knob], values: Values):
        self._knobs = {knob.name: knob for knob in knobs}
        self._values = {name: values[name] for name, knob in self._knobs.items() if not knob.action}
        self.revision = 0

    @property
    def values(self) -> Changes:
        return dict(self._values)

    def states(self) -> list[KnobState]:
        return [
            KnobState(
                k.name,
                self._values.get(k.name),
                k.legal(self._values),
                k.loss_neutral,
                k.about,
                k.action,
                k.ends,
            )
            for k in self._knobs.values()
        ]

    def prepare(self, changes: Values) -> Prepared:
        """Check `changes` as a whole, then call `Knob.prepare` for each changed knob. If the changes are refused, the
        ValueError says why in one sentence.
        """
        would_be = self.check(changes)
        return [(self._knobs[name].commit, self._knobs[name].prepare(would_be)) for name in changes]

    def waits(self, changes: Values) -> str:
        """Why the prepared `changes` must wait for a later step, or "" if they can be committed now. Raises ValueError
        with a one-sentence message if the changes can never be committed.
        """
        asked = {
            name: self._knobs[name].waits(self._knobs[name].cast(value)) for name, value in changes.items()
        }
        return "; ".join(why for why in asked.values() if why)

    def check(self, changes: Values) -> Values:
        """Check `changes`, and return the values that all knobs of the board would have after these changes. If the
        values are not legal, raise ValueError with a one-sentence message that says why.
        """
        unknown = [name for name in changes if name not in self._knobs]
        if unknown:
            raise ValueError(f"there is no knob {unknown[0]}; the knobs are {', '.join(self._knobs)}")
        would_be = self._values | dict(changes)
        # Every knob is checked: a new schedule may make an unchanged micro-batch count illegal.
        for knob in self._knobs.values():
            if knob.name not in would_be:  # an action that is not requested
                continue
            value = would_be[knob.name]
            refusal = KnobState(knob.name, value, knob.legal(would_be), knob.loss_neutral).refusal(value)
            if refusal:
                raise ValueError(refusal)
        return would_be | {name: self._knobs[name].cast(would_be[name]) for name in changes}

    def commit(self, revision: int, changes: Values, prepared: Prepared) -> str:
        """Apply prepared changes. Returns a sentence that says which changes were not applied and why, or "".

        If a change is not applied, this board and its digest differ from those of the other ranks.
        """
        failed: dict[str, str] = {}
        for name, (swap, built) in zip(changes, prepared, strict=False):
            try:
                swap(built)
            except NotAppliedError as error:
                failed[name] = str(error)
        kept = {
            name: self._knobs[name].cast(value)
            for name, value in changes.items()
            if name in self._values and name not in failed
        }
        self._values |= kept
        self.revision = revision
        return "; ".join(failed.values())

    def take_back(self, values: Changes) -> None:
        """Restore `values` after a change that no rank could carry out."""
        self._values |= values

    def in_force(self, changes: Values) -> Changes:
        """The current values of the knobs in `changes`; an action has no value."""
        return {name: self._values[name] for name in changes if name in self._values}

    def digest(self) -> str:
        """A digest that is equal on two ranks if and only if the revision and all values are equal."""
        state = msgspec.msgpack.encode([self.revision, sorted(self._values.items())])
        return hashlib.blake2b(state, digest_size=8).hexdigest()
