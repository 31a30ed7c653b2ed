"""Messages about changes of a run's knobs: proposals, commands and acks, trials, and preview queries."""

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from agents.protocol.base import Changes, Count, Message, Name, Rank, Real, Revision, Text

PAUSED: Final = "paused"
"""The operation (`Pulse.doing`) of a rank that an operator has paused; it counts neither as stalled nor as hung."""

PREVIEWS: Final = "preview"
"""The capability (`Hello.capabilities`) of a rank that answers preview queries."""

MOVED_ON: Final = "the board has changed"
"""The beginning of the refusal of a proposal whose base revision is no longer in force."""

PENDING_CHANGE: Final = "another change to revision"
"""The beginning of the refusal of a proposal while another change is pending."""

MOST_TRIAL_STEPS: Final = 10_000
"""Maximum number of steps that a trial measures before the change, and as many after it."""

# Shorter than a Name, because the ids of the trial's proposals are this id with a suffix.
TrialName = Annotated[str, Meta(min_length=1, max_length=48)]


# ------------------------------------------------------------------------------------------------ changes


class Propose(Message, frozen=True):
    """A client proposes to change one or more knobs. Either all of these changes are applied, or none. With `undo`, the
    client proposes to undo the newest change that has not been undone; the hub then fills in `changes`.
    """

    id: Name  # the client chooses it, so that a repeated proposal is applied once
    changes: Changes
    base_revision: Revision | None = None  # the hub refuses the proposal if the board has a newer revision
    expires_step: Count | None = None
    who: Text = ""
    reason: Text = ""  # the operator's reason, shown in the log
    undo: bool = False


class Command(Message, frozen=True):
    """A proposal that the hub has written to its journal. The hub resends the command to the leader until the leader
    acknowledges it.
    """

    revision: Revision
    id: Name
    changes: Changes
    expires_step: Count | None = None


class Ack(Message, frozen=True):
    """A rank reports the outcome of a command; `digest` is the digest of the rank's knob board after the command.

    Only the leader sends "agreed", for a command that takes longer than a step, such as saving a checkpoint. The field
    `why` of this ack describes the work in progress, and a second ack reports the outcome. The hub does not wait for
    the second ack before it sends later commands.
    """

    rank: Rank
    revision: Revision
    state: Literal["applied", "rejected", "expired", "agreed"]
    step: Count
    digest: Name
    why: Text = ""
    before: Changes = {}  # values of the changed knobs before the command


class CommandState(Message, frozen=True):
    """The state of one proposal, published whenever it changes. Revision 0 means that the proposal was refused before
    it got a revision.
    """

    id: Name
    revision: Revision
    state: Literal["accepted", "applied", "rejected", "expired", "rolled_back"]
    changes: Changes
    before: Changes  # values before the change; until it is applied, the values at the time of the proposal
    who: Text
    time_s: float
    acks: Count = 0
    world: Count = 0
    applied_step: Count | None = None
    why: Text = ""  # why the proposal was refused or, if it was accepted, what it waits for
    reason: Text = ""
    asked_s: float = 0.0
    undoes: Revision = 0  # the revision that this change undoes
    failed: Count = 0  # number of ranks that report that they did not apply the change

    @property
    def settled(self) -> bool:
        """Whether the outcome is decided: the change is in force on every rank, or on none."""
        if self.state == "applied":
            return self.acks >= self.world
        return self.state != "accepted"

    @property
    def final(self) -> bool:
        """Whether every rank has answered, so that the state no longer changes."""
        return self.settled or (self.state == "applied" and self.acks + self.failed >= self.world)


# ------------------------------------------------------------------------------------------------- trials


class Try(Message, frozen=True):
    """A client starts a trial of `changes`. The hub measures `steps` steps before the changes take effect, and `steps`
    steps afterwards. The values are reverted unless the run is significantly faster or an operator decides to keep the
    values.
    """

    id: TrialName
    changes: Changes
    steps: Annotated[int, Meta(ge=4, le=MOST_TRIAL_STEPS)]
    who: Text = ""
    reason: Text = ""


class Decide(Message, frozen=True):
    """An operator ends a trial: its values are kept (`keep`) or reverted at once. An empty `id` means the running
    trial."""

    keep: bool
    id: Annotated[str, Meta(max_length=48)] = ""
    who: Text = ""


class TrialState(Message, frozen=True):
    """Progress of a trial, published at every change of its state and at intervals in between.

    The ratio is the geometric mean of the step times after the change, divided by that of the step times before the
    change. `low` and `high` are the bounds of the ratio's 95 % confidence interval.
    """

    id: TrialName
    state: Literal["before", "applying", "after", "reverting", "kept", "reverted", "failed"]
    changes: Changes
    before: Changes
    steps: Count
    who: Text
    time_s: float  # time of this state
    loss_neutral: bool
    began_s: float
    reason: Text = ""
    measured: Count = 0  # number of steps measured in the current window
    revision: Revision = 0  # revision of the tried change
    before_ms: float | None = None
    after_ms: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    loss_before: float | None = None
    loss_after: float | None = None
    why: Text = ""  # reason for the outcome

    @property
    def settled(self) -> bool:
        """Whether the trial has ended."""
        return self.state in ("kept", "reverted", "failed")


# ---------------------------------------------------------------------------------------------- previews


class Preview(Message, frozen=True):
    """A preview query: what would these changes do? The hub forwards the query from a client to the leader. The query
    changes nothing.
    """

    id: Name
    changes: Changes


NARROW: Final = 0.2  # widest interval, relative to the estimate, that is shown as a point estimate


class Estimate(Struct, array_like=True, frozen=True):
    """The current value of a quantity (`now`), and its predicted value after the change (`after`). The prediction may
    have an interval (`low` to `high`); only the interval is shown if it is wide, or if it contains the current value
    and `after` differs from this value.

    If `after`, `low` and `high` are None, there is no estimate.
    """

    quantity: Name  # the name includes the unit: step_ms, bubble, memory_bytes, comm_bytes, dropped
    now: Real | None = None
    after: Real | None = None
    low: Real | None = None
    high: Real | None = None
    source: Text = ""  # the source of the estimates, or why there are none

    @property
    def known(self) -> bool:
        return self.after is not None or self.interval is not None

    @property
    def interval(self) -> tuple[float, float] | None:
        return None if self.low is None or self.high is None else (self.low, self.high)

    @property
    def point(self) -> float | None:
        """The predicted value (`after`) if it may be shown without its interval, else None. It may not if the interval
        is too wide, or if it predicts a change although the interval contains the current value (`now`)."""
        if self.after is None or self.interval is None:
            return self.after
        low, high = self.interval
        if high - low > NARROW * abs(self.after):
            return None
        return self.after if self.now in (None, self.after) or self.direction else None

    @property
    def direction(self) -> int:
        """1 if the value increases, -1 if it decreases, 0 if it does not change, or if the direction is unknown because
        the interval contains the current value."""
        if self.now is None:
            return 0
        low, high = self.interval or (self.after, self.after)
        if low is None or high is None:
            return 0
        return (low > self.now) - (high < self.now)


class Previewed(Message, frozen=True):
    """The answer to a preview query. `why`: why the changes are not legal, or why there is no estimate."""

    id: Name
    changes: Changes
    revision: Revision
    why: Text = ""
    loss_neutral: bool | None = None  # None: unknown
    estimates: Annotated[list[Estimate], Meta(max_length=32)] = []
