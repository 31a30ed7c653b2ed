"""From a proposal to a knob that is turned on every rank: the life of a command, without a socket in sight.

checked -> in the journal -> accepted (has a revision) -> with the leader, one at a time -> applied n/world,
rejected or expired. Asking again with the same id gives the same answer; a revision number is never used
twice.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from msgspec import structs

from agents.journal import Entry, Journal, Written
from agents.roster import LARGEST_REVISION, Roster
from agents.sequence import Sequence
from agents.wire import Ack, Changes, Command, CommandState, Event, Hello, KnobState, Propose, clip

WAITING = 64  # proposals on their way at once
REMEMBERED = 256  # commands whose late acknowledgements are still counted
RESEND_S = 1.0  # to the leader, until it has acknowledged


@dataclass
class _Issue:
    """One command on its way, or lately arrived."""

    state: CommandState
    expires_step: int | None
    digest: str | None = None  # of the first rank's board after it; all must be equal
    acked: set[int] = field(default_factory=set)
    untold: bool = False  # acknowledgements have come in since it was last published

    @property
    def entry(self) -> Entry:
        return Entry(self.state, self.expires_step)


class Control:
    """Every proposal and command of one run."""

    def __init__(self, sequence: Sequence, roster: Roster, journal: Journal) -> None:
        self._sequence = sequence
        self._roster = roster
        self._journal = journal
        self._last_revision = journal.last_revision
        self._being_written: dict[str, _Issue] = {}
        self._waiting: deque[_Issue] = deque()  # for the leader, the first of them with it
        self._by_revision: dict[int, _Issue] = {}  # waiting and lately settled
        self._sent: tuple[int, float] = (0, 0.0)  # the revision last sent to the leader, and when
        for entry in journal.entries:
            self._recall(entry)

    def _recall(self, entry: Entry) -> None:
        self._sequence.publish(entry.state)
        issue = _Issue(entry.state, entry.expires_step)
        if entry.state.state == "accepted":
            self._waiting.append(issue)
        if entry.state.revision and not entry.state.settled:
            self._remember(issue)

    # ------------------------------------------------------------------------------------------ proposals

    def propose(self, propose: Propose) -> None:
        """Take a proposal; its answer is a published CommandState."""
        known = self._sequence.state.commands.get(propose.id)
        if known:
            self._sequence.publish(known)
            return
        if propose.id in self._being_written:
            return
        refusal = self._refusal(propose)
        if refusal:
            self._refuse(propose, refusal)
            return
        # The number is spent here: should the journal fail it may be on disk all the same.
        self._last_revision += 1
        state = self._state(propose, self._last_revision, "accepted")
        self._being_written[propose.id] = _Issue(state, propose.expires_step)
        self._journal.insert(Entry(state, propose.expires_step))

    def _refusal(self, propose: Propose) -> str | None:
        board = self._sequence.state.board
        leader = self._roster.leader
        if board is None:
            return "no rank has shown its knobs yet; ask again when the run has started"
        if leader is None:
            return f"rank {board.rank}, which leads, is gone; nothing can be changed without it"
        if not propose.changes:
            return "nothing is asked to be changed"
        knobs = {knob.name: knob for knob in board.knobs}
        for name in propose.changes:
            if name not in knobs:
                return f"there is no knob {name}; the knobs are {', '.join(knobs)}"
        under_way = len(self._being_written) + len(self._waiting)
        if under_way >= WAITING:
            return f"{WAITING} changes are under way already; ask again when they have settled"
        if propose.base_revision is not None:
            if propose.base_revision != self.revision:
                return f"the board has moved on: revision {self.revision}, not {propose.base_revision}"
            if under_way:
                first = [*self._waiting, *self._being_written.values()][0].state
                return f"another change to revision {self.revision} is under way, by {first.who or 'someone'}"
        step = self._step(leader.rank)
        if propose.expires_step is not None and propose.expires_step < step:
            return f"step {propose.expires_step} is past; the run is at step {step}"
        # What is legal depends on the whole board as it would be. Only the ranks know that; the board shows
        # it for one change to the values in force.
        if len(propose.changes) == 1:
            return _illegal(propose.changes, knobs)
        return None

    @property
    def revision(self) -> int:
        """The knob revision in force, as far as the hub has heard."""
        board = self._sequence.state.board
        applied = (r for r, issue in self._by_revision.items() if issue.state.state == "applied")
        return max(board.revision if board else 0, max(applied, default=0))

    def _step(self, leader: int) -> int:
        state = self._sequence.state
        summary = state.summaries[-1].step if state.summaries else 0
        return max(
            [summary, *(known[leader].step for known in (state.steps, state.pulses) if leader in known)]
        )

    def _state(
        self, propose: Propose, revision: int, state: Literal["accepted", "rejected"], why: str = ""
    ) -> CommandState:
        board = self._sequence.state.board
        before = (
            {k.name: k.value for k in board.knobs if k.name in propose.changes and not k.action}
            if board
            else {}
        )
        return CommandState(
            id=propose.id,
            revision=revision,
            state=state,
            changes=propose.changes,
            before=before,
            who=propose.who,
            time_s=time.time(),
            world=self._roster.world,
            why=clip(why),
        )

    def refuse(self, propose: Propose, why: str) -> None:
        """Turn down a proposal; one that is known already keeps what became of it."""
        if propose.id not in self._sequence.state.commands and propose.id not in self._being_written:
            self._refuse(propose, why)

    def _refuse(self, propose: Propose, why: str) -> None:
        state = self._state(propose, 0, "rejected", why)
        self._sequence.publish(state)
        self._journal.update(Entry(state, propose.expires_step))

    def journal_wrote(self, written: Written) -> None:
        """A proposal is on disk, or could not be put there."""
        issue = self._being_written.pop(written.entry.state.id)
        if written.known:
            self._sequence.publish(written.known)
        elif written.error:
            self._sequence.publish(
                structs.replace(
                    issue.state, state="rejected", revision=0, why=written.error, time_s=time.time()
                )
            )
        else:
            self._waiting.append(issue)
            self._remember(issue)
            self._sequence.publish(issue.state)

    # ------------------------------------------------------------------------------- commands and their fate

    def due(self, now: float) -> Command | None:
        """The command to hand to the leader now, if any: the first that waits, again each RESEND_S."""
        if not self._waiting or self._roster.leader is None:
            return None
        state = self._waiting[0].state
        revision, sent_s = self._sent
        if state.revision == revision and now - sent_s < RESEND_S:
            return None
        self._sent = (state.revision, now)
        return Command(state.revision, state.id, state.changes, self._waiting[0].expires_step)

    def hurry(self) -> None:
        """The leader has said hello anew: what waits goes to it at once."""
        self._sent = (0, 0.0)

    def ack(self, ack: Ack) -> None:
        """A rank tells what became of a command. All decide alike; one that differs is an error event."""
        issue = self._by_revision.get(ack.revision)
        if issue is None or ack.rank in issue.acked:
            return
        issue.acked.add(ack.rank)
        if issue.state.state == "accepted":
            applied_step = ack.step if ack.state == "applied" else None
            issue.digest = ack.digest
            issue.state = structs.replace(
                issue.state, state=ack.state, applied_step=applied_step, why=ack.why
            )
            self._waiting.remove(issue)
            self._tell(issue)
            return
        issue.untold = True
        if ack.state != issue.state.state:
            self._alarm(
                f"rank {ack.rank} says {ack.state} of revision {ack.revision}, others {issue.state.state}"
            )
        elif issue.digest and ack.digest != issue.digest:
            self._alarm(
                f"after revision {ack.revision} the knobs of rank {ack.rank} differ from those of other ranks"
            )
        issue.digest = issue.digest or ack.digest

    def tell_acks(self) -> None:
        """Publish the acknowledgements that came in since the last call, one state a command."""
        for issue in self._by_revision.values():
            if issue.untold:
                self._tell(issue)

    def _tell(self, issue: _Issue) -> None:
        issue.untold = False
        acks = max(issue.state.acks, len(issue.acked))
        settles = acks >= issue.state.world or issue.state.acks == 0
        issue.state = structs.replace(issue.state, acks=acks, time_s=time.time())
        self._sequence.publish(issue.state)
        if settles:  # the counts in between are not worth an fsync each
            self._journal.update(issue.entry)

    def leader_began(self, leader: Hello) -> None:
        """A run that goes on from a snapshot has the knobs as of then: what was asked of it later is not replayed."""
        for state in list(self._sequence.state.commands.values()):
            if state.revision <= leader.revision or state.time_s >= leader.began_s:
                continue
            goes_on = f"the run went on from step {leader.step}, at revision {leader.revision}"
            if state.state == "applied":
                state = structs.replace(state, state="rolled_back", why=goes_on)
            elif state.state == "accepted":
                state = structs.replace(state, state="expired", why=f"{goes_on}, before this was applied")
            else:
                continue
            self._waiting = deque(one for one in self._waiting if one.state.id != state.id)
            self._by_revision.pop(state.revision, None)
            state = structs.replace(state, time_s=time.time())
            self._sequence.publish(state)
            self._journal.update(Entry(state))

    def leader_ended(self) -> None:
        """The leader said goodbye: what waits will never be applied."""
        while self._waiting:
            issue = self._waiting.popleft()
            issue.state = structs.replace(
                issue.state, state="expired", why="the run ended before this was applied"
            )
            self._tell(issue)

    def seen_revision(self, revision: int) -> None:
        """A rank is at this revision, so it is taken, whatever the journal says."""
        if revision <= LARGEST_REVISION:
            self._last_revision = max(self._last_revision, revision)

    def _remember(self, issue: _Issue) -> None:
        self._by_revision[issue.state.revision] = issue
        if len(self._by_revision) > REMEMBERED:
            del self._by_revision[next(iter(self._by_revision))]

    def _alarm(self, text: str) -> None:
        self._sequence.publish(Event(time.time(), "error", "hub", text))


def _illegal(changes: Changes, knobs: dict[str, KnobState]) -> str | None:
    refusals = (knobs[name].refusal(value) for name, value in changes.items())
    return next((refusal for refusal in refusals if refusal), None)
