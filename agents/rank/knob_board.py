"""The knob board: what an operator may turn, what is legal now, and the swap that cannot fail half-way.

A knob's legal values may depend on the whole board (micro-batches on the schedule, say), so legality is asked
of the board as it *would* be. A change has two parts: `prepare`, which may refuse and builds whatever the new
value needs, and `commit`, which only swaps it in.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from agents.protocol import Changes, KnobState, Legal, Value

Values = Mapping[str, Value]


class NotAppliedError(Exception):
    """A `commit` that is not ours failed, and the knob is as it was; the text says which and why."""


def _as_it_is(value: Value) -> Value:
    return value


@dataclass(frozen=True)
class Knob:
    """One thing an operator may turn.

    `legal` is given the board's values as they would be. `prepare` is given them too, may raise ValueError
    with a sentence, and returns what `commit` needs; `commit` must not fail, or if it calls what is not ours, with
    NotAppliedError.

    An `action` holds no value: setting it asks for something to be done once, such as a snapshot, and `commit` only
    takes note of the wish.
    """

    name: str
    legal: Callable[[Values], Legal]
    loss_neutral: bool
    about: str
    commit: Callable[[Any], None]
    prepare: Callable[[Values], Any]
    action: bool = False
    ends: bool = False  # the action ends the run
    cast: Callable[[Value], Value] = (
        _as_it_is  # a legal value as it is kept; may raise ValueError with a sentence
    )


class KnobBoard:
    """The knobs of one rank and their values; the same on every rank of a run."""

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

    def prepare(self, changes: Values) -> list[tuple[Callable[[Any], None], Any]]:
        """Check `changes` as one whole and build what they need; ValueError says in a sentence why not."""
        would_be = self.check(changes)
        return [(self._knobs[name].commit, self._knobs[name].prepare(would_be)) for name in changes]

    def check(self, changes: Values) -> Values:
        """All values as they would be; ValueError says in a sentence why they are not legal."""
        unknown = [name for name in changes if name not in self._knobs]
        if unknown:
            raise ValueError(f"there is no knob {unknown[0]}; the knobs are {', '.join(self._knobs)}")
        would_be = self._values | dict(changes)
        # Every knob is asked again: a new schedule may make an untouched micro-batch count illegal.
        for knob in self._knobs.values():
            if knob.name not in would_be:  # an action that was not asked for
                continue
            value = would_be[knob.name]
            refusal = KnobState(knob.name, value, knob.legal(would_be), knob.loss_neutral).refusal(value)
            if refusal:
                raise ValueError(refusal)
        return would_be | {name: self._knobs[name].cast(would_be[name]) for name in changes}

    def commit(
        self, revision: int, changes: Values, prepared: list[tuple[Callable[[Any], None], Any]]
    ) -> str:
        """Swap them in. Returns what was not applied and why, or nothing: then this board differs from those where it
        was, in its digest too."""
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

    def in_force(self, changes: Values) -> Changes:
        """The present values of the knobs in `changes`; an action has none."""
        return {name: self._values[name] for name in changes if name in self._values}

    def digest(self) -> str:
        """Equal on two ranks exactly when revision and every value are."""
        state = msgspec.msgpack.encode([self.revision, sorted(self._values.items())])
        return hashlib.blake2b(state, digest_size=8).hexdigest()
