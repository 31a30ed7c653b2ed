"""One command on its way, or lately arrived, and what ranks have said of it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import structs

from agents.protocol import Ack, Changes, CommandState, KnobState
from agents.recording.commands import Entry


@dataclass
class Issue:
    """What `Control` knows of one command."""

    state: CommandState
    expires_step: int | None
    early: bool = False  # asked before the ranks of this run were here, so that it is for them
    sent: bool = False  # to the leader
    agreed: bool = False  # by the ranks, which carry it out beside their steps: no longer in the queue
    from_journal: bool = (
        False  # from the journal: what ranks said of it may have been said to a hub that was killed
    )
    digest: str | None = None  # of the first rank's board after it; all must be equal
    acked: set[int] = field(default_factory=set)
    contradicting: set[int] = field(default_factory=set)  # of those, who say that something else became of it
    held_acks: dict[int, Ack] = field(default_factory=dict)  # by rank: refusals ahead of the leader's word
    unpublished: bool = False  # acknowledgements have come in since it was last published
    journalled: CommandState | None = None  # as the journal was given it last

    @property
    def entry(self) -> Entry:
        return Entry(self.state, self.expires_step)

    @property
    def under_way(self) -> bool:
        """The ranks have agreed on it and not carried it out yet."""
        return self.agreed and self.state.state == "accepted"

    @property
    def partial(self) -> bool:
        """In force, and not every rank has said so."""
        return self.state.state == "applied" and not self.state.settled

    def count(self) -> None:
        """Put into the state how many ranks have said what."""
        state = self.state
        self.state = structs.replace(
            state,
            acks=max(state.acks, len(self.acked - self.contradicting)),
            failed=max(state.failed, len(self.contradicting)) if state.state == "applied" else 0,
            time_s=time.time(),
        )

    @property
    def needs_journalling(self) -> bool:
        """Whether the journal should have it now: the counts in between are not worth an fsync each."""
        known = self.journalled
        return (
            known is None
            or self.state.final
            or (known.state, known.why) != (self.state.state, self.state.why)
        )

    @property
    def counts_outdated(self) -> bool:
        """Whether the journal has older counts."""
        known = self.journalled
        return (
            self.partial
            and known is not None
            and (known.acks, known.failed) != (self.state.acks, self.state.failed)
        )


def lost_before_ack(rank: int) -> str:
    """Why fewer ranks than all have said that a command is in force."""
    return f"rank {rank} was lost before it said so"


def illegal(changes: Changes, knobs: Mapping[str, KnobState]) -> str | None:
    """Why one of `changes` is not legal beside the values in force, or None."""
    refusals = (knobs[name].refusal(value) for name, value in changes.items())
    return next((refusal for refusal in refusals if refusal), None)
