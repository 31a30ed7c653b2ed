"""Messages about changing a run: proposals and their fate, trials, and what a change would do."""

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from agents.protocol.base import Changes, Count, Message, Name, Rank, Real, Revision, Text

PAUSED: Final = "paused"
"""What a rank does (`Pulse.doing`) while it holds still at an operator's word: it is neither stalled nor hung."""

PREVIEWS: Final = "preview"
"""The capability (`Hello.capabilities`) of a rank that can say what a change would do."""

MOST_TRIAL_STEPS: Final = 10_000
"""Steps that a trial measures before, and after, at most."""

TrialName = Annotated[str, Meta(min_length=1, max_length=48)]  # with room for what its proposals are called


# ------------------------------------------------------------------------------------------------ changes


class Propose(Message, frozen=True):
    """A client asks for a change of one or several knobs, all or none; or, with `undo`, that the newest change that
    is not undone yet be taken back: then `changes` are the hub's to fill in."""

    id: Name  # the client's own, so that sending it twice asks once
    changes: Changes
    base_revision: Revision | None = None  # refuse if the board has moved on
    expires_step: Count | None = None
    who: Text = ""
    reason: Text = ""  # in the operator's words, for the log
    undo: bool = False


class Command(Message, frozen=True):
    """The hub hands a journalled proposal to the leader; repeated until it is acknowledged."""

    revision: Revision
    id: Name
    changes: Changes
    expires_step: Count | None = None


class Ack(Message, frozen=True):
    """A rank says what became of a command; `digest` is of its whole board after it.

    "agreed" comes from the leader alone, of a command that takes longer than a step, such as a save: `why` says what is
    under way, later commands need not wait for it, and another ack follows.
    """

    rank: Rank
    revision: Revision
    state: Literal["applied", "rejected", "expired", "agreed"]
    step: Count
    digest: Name
    why: Text = ""
    before: Changes = {}  # values of the changed knobs until then


class CommandState(Message, frozen=True):
    """What is known of one proposal, published at every change. Revision 0: refused before it had one."""

    id: Name
    revision: Revision
    state: Literal["accepted", "applied", "rejected", "expired", "rolled_back"]
    changes: Changes
    before: Changes  # until it is applied: as of the proposal
    who: Text
    time_s: float
    acks: Count = 0
    world: Count = 0
    applied_step: Count | None = None
    why: Text = ""  # it was refused; or, of one that is accepted, what it waits for
    reason: Text = ""
    asked_s: float = 0.0
    undoes: Revision = 0  # the revision that this one takes back
    failed: Count = 0  # ranks that say that it is not in force there

    @property
    def settled(self) -> bool:
        """It is in force on every rank, or nowhere."""
        if self.state == "applied":
            return self.acks >= self.world
        return self.state != "accepted"

    @property
    def final(self) -> bool:
        """Every rank has answered: nothing more will become of it while they go on."""
        return self.settled or (self.state == "applied" and self.acks + self.failed >= self.world)


# ------------------------------------------------------------------------------------------------- trials


class Try(Message, frozen=True):
    """A client asks that one knob be tried: `steps` are measured before and after, and the value is taken back unless
    the run is clearly faster, or someone decides to keep it."""

    id: TrialName
    changes: Changes
    steps: Annotated[int, Meta(ge=4, le=MOST_TRIAL_STEPS)]
    who: Text = ""
    reason: Text = ""


class Decide(Message, frozen=True):
    """An operator ends a trial: what is tried stays, or is taken back now. No `id`: the one under way."""

    keep: bool
    id: Annotated[str, Meta(max_length=48)] = ""
    who: Text = ""


class TrialState(Message, frozen=True):
    """How a trial stands, published at every change of state and now and then in between.

    The ratio is of geometric means of step times, after over before, in a 95 % interval.
    """

    id: TrialName
    state: Literal["before", "applying", "after", "reverting", "kept", "reverted", "failed"]
    changes: Changes
    before: Changes
    steps: Count
    who: Text
    time_s: float  # of this state
    loss_neutral: bool
    began_s: float
    reason: Text = ""
    measured: Count = 0  # steps of the present window
    revision: Revision = 0  # under which it is tried
    before_ms: float | None = None
    after_ms: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    loss_before: float | None = None
    loss_after: float | None = None
    why: Text = ""  # for what became of it

    @property
    def settled(self) -> bool:
        """Nothing more will become of it."""
        return self.state in ("kept", "reverted", "failed")


# ---------------------------------------------------------------------------------------------- questions


class Preview(Message, frozen=True):
    """What would these changes do? Asked by a client, handed on to the leader; nothing is changed."""

    id: Name
    changes: Changes


NARROW: Final = 0.2  # of the estimate: in a wider interval no one value is likelier than the others


class Estimate(Struct, array_like=True, frozen=True):
    """One quantity now and as it would be: an interval, and a value where the interval is narrow or there is none.
    Without any of the three there is no data."""

    quantity: Name  # its unit is in its name: step_ms, bubble, memory_bytes, comm_bytes, dropped
    now: Real | None = None
    after: Real | None = None
    low: Real | None = None
    high: Real | None = None
    source: Text = ""  # where they come from, or why there are none

    @property
    def known(self) -> bool:
        return self.after is not None or self.interval is not None

    @property
    def interval(self) -> tuple[float, float] | None:
        return None if self.low is None or self.high is None else (self.low, self.high)

    @property
    def point(self) -> float | None:
        """`after`, unless its interval is wide, whoever sent it."""
        if self.after is None or self.interval is None:
            return self.after
        low, high = self.interval
        return self.after if high - low <= NARROW * abs(self.after) else None


class Previewed(Message, frozen=True):
    """The answer. `why`: the changes are not legal, or nobody can say."""

    id: Name
    changes: Changes
    revision: Revision
    why: Text = ""
    loss_neutral: bool | None = None  # None: nobody can say
    estimates: Annotated[list[Estimate], Meta(max_length=32)] = []
