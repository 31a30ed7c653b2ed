"""One command that is pending or whose result has recently become known, with the acks received for it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import structs

from agents.protocol import Ack, Changes, CommandState, Hello, KnobState, clip
from agents.recording.commands import Entry


@dataclass
class Issue:
    """A command, its state, and the acks received for it."""

    state: CommandState
    expires_step: int | None
    early: bool = False  # proposed before any rank of this run had connected
    sent: bool = False  # whether it has been sent to the leader
    agreed: bool = False  # the ranks execute it during training, so it is no longer in the queue
    # Loaded from the journal; its acks may have been sent to an earlier, killed hub process.
    from_journal: bool = False
    # Digest of the board after the command, from the first ack; must be equal on all ranks.
    digest: str | None = None
    acked: set[int] = field(default_factory=set)
    contradicting: set[int] = field(default_factory=set)  # ranks whose ack contradicts the leader's ack
    # Rejections that arrived before the leader's ack, by rank.
    held_acks: dict[int, Ack] = field(default_factory=dict)
    unpublished: bool = False  # whether acks have arrived since the last publication
    journalled: CommandState | None = None  # the state last written to the journal

    @property
    def entry(self) -> Entry:
        return Entry(self.state, self.expires_step)

    @property
    def under_way(self) -> bool:
        """Whether the ranks have agreed on the command and have not finished it yet, because it takes longer than a
        step (such as a save)."""
        return self.agreed and self.state.state == "accepted"

    @property
    def partial(self) -> bool:
        """Whether the command is applied, but not every rank has acknowledged it yet."""
        return self.state.state == "applied" and not self.state.settled

    def settle(self, ack: Ack, world: int) -> None:
        """Record `ack` as the result of an accepted command. Later acks cannot change the result."""
        self.acked.add(ack.rank)
        self.digest = ack.digest
        self.state = structs.replace(
            self.state,
            state=ack.state,
            applied_step=ack.step if ack.state == "applied" else None,
            why=ack.why,
            before=ack.before or self.state.before,
            world=world or self.state.world,
        )

    def add_ack(self, ack: Ack) -> str:
        """Count another rank's ack of a command whose result is already known; returns an error if the ack contradicts
        the result."""
        self.acked.add(ack.rank)
        self.unpublished = True
        error = ""
        if self.state.why == lost_before_ack(ack.rank):
            self.state = structs.replace(self.state, why="")
        if ack.state != self.state.state:
            self.contradicting.add(ack.rank)
            says, why = f"rank {ack.rank} reports {ack.state}", f": {ack.why}" if ack.why else ""
            if self.state.state == "applied":
                self.state = structs.replace(self.state, why=clip(says + why))
            error = clip(f"{says} for revision {ack.revision}, other ranks {self.state.state}{why}")
        elif self.digest and ack.digest != self.digest:
            error = (
                f"after revision {ack.revision} the knobs of rank {ack.rank} differ from those of other ranks"
            )
        self.digest = self.digest or ack.digest
        return error

    def count(self) -> None:
        """Update the ack counts in the state."""
        state = self.state
        self.state = structs.replace(
            state,
            acks=max(state.acks, len(self.acked - self.contradicting)),
            failed=max(state.failed, len(self.contradicting)) if state.state == "applied" else 0,
            time_s=time.time(),
        )

    @property
    def needs_journalling(self) -> bool:
        """Whether to write the command to the journal now. Intermediate ack counts are not written, because each write
        costs an fsync.
        """
        known = self.journalled
        return (
            known is None
            or self.state.final
            or (known.state, known.why) != (self.state.state, self.state.why)
        )

    @property
    def counts_outdated(self) -> bool:
        """Whether the ack counts in the journal are out of date."""
        known = self.journalled
        return (
            self.partial
            and known is not None
            and (known.acks, known.failed) != (self.state.acks, self.state.failed)
        )


def lost_before_ack(rank: int) -> str:
    """The text added to a command's state if `rank` is lost before it acknowledges the command."""
    return f"rank {rank} was lost before its ack"


def illegal(changes: Changes, knobs: Mapping[str, KnobState]) -> str | None:
    """Why one of `changes` is not legal together with the current values of the other knobs; None if all are legal."""
    refusals = (knobs[name].refusal(value) for name, value in changes.items())
    return next((refusal for refusal in refusals if refusal), None)


def resumed_state(state: CommandState, issue: Issue | None, leader: Hello) -> CommandState | None:
    """The new state of a command after `leader` resumed the run from a checkpoint; None if the state is unchanged."""
    goes_on = f"the run resumed from step {leader.step}, at revision {leader.revision}"
    if state.state == "accepted" and issue and issue.early:
        if issue.sent or state.revision > leader.revision:
            return None  # the command was proposed after the run resumed
        return structs.replace(
            state,
            state="expired",
            why=f"{goes_on}, where this revision is already used; propose the change again",
        )
    if state.revision <= leader.revision or state.time_s >= leader.began_s:
        return None
    if state.state == "applied":
        return structs.replace(state, state="rolled_back", why=goes_on)
    if state.state == "accepted":
        return structs.replace(state, state="expired", why=f"{goes_on}, before the change was applied")
    return None
