"""Handles each command from its proposal until every rank has acknowledged it. Uses no sockets.

checked -> in the journal -> accepted (has a revision) -> sent to the leader, one at a time -> applied on n of `world`
ranks, rejected or expired. An applied command is rolled back if the run resumes from a checkpoint that was saved before
the command. A proposal repeated with the same id gets the same answer; a revision is never used twice.
"""

import time
from collections import deque

from msgspec import structs

from agents.hub.commands import proposal_checks
from agents.hub.commands.issue import Issue, lost_before_ack, resumed_state
from agents.hub.commands.journal import Journal
from agents.hub.commands.journal_file import Written
from agents.hub.commands.proposal_checks import (
    WAITING,
    new_command,
    undo_proposal,
    values_in_force,
    wait_reason,
)
from agents.hub.telemetry.membership import LARGEST_REVISION, Membership
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import Ack, Command, CommandState, Event, Hello, Propose, clip
from agents.recording.commands import Entry

TRACKED = 256  # number of settled commands for which late acks are still counted
RESEND_S = 1.0  # interval at which a command is sent again until the leader acknowledges it
# Maximum number of proposals being written to disk; further ones are dropped, and their clients repeat them.
WRITING = 1024


class Control:
    """All proposals and commands of one run."""

    def __init__(self, update_log: UpdateLog, membership: Membership, journal: Journal) -> None:
        self._update_log = update_log
        self._membership = membership
        self._journal = journal
        self._last_revision = 0
        self._being_written: dict[str, Issue] = {}
        # In order of revision; the first command has been sent to the leader.
        self._waiting: deque[Issue] = deque()
        self._by_revision: dict[int, Issue] = {}  # waiting and recently settled commands
        self._sent: tuple[int, float] = (0, 0.0)  # the revision last sent to the leader, and when
        # Ids of proposals that could not be written to disk.
        self._unwritten: deque[str] = deque(maxlen=WAITING)
        self.ended: str | None = None  # why the leader ended, as ": CAUSE" or ""; None while it trains
        self.load_journal()

    def load_journal(self) -> None:
        """Load the commands that the journal has read from disk. Called again when the journal file is opened after an
        earlier failure."""
        found = self._journal.found
        self._last_revision = max(self._last_revision, found.last_revision)
        for entry in found.entries:
            self._load(entry)

    def _load(self, entry: Entry) -> None:
        self._update_log.publish(entry.state)
        issue = Issue(entry.state, entry.expires_step, from_journal=True, journalled=entry.state)
        if entry.state.state == "accepted":
            self._waiting.append(issue)
        if entry.state.revision and not entry.state.settled:
            self._track(issue)

    # ------------------------------------------------------------------------------------------ proposals

    def propose(self, propose: Propose, undoes: int = 0) -> None:
        """Handle a proposal. The answer to the client is a CommandState, which is published to all subscribers.
        `undoes`: the revision to revert."""
        known = self._update_log.state.commands.get(propose.id)
        if known:
            self._update_log.publish(known)
            return
        if propose.id in self._being_written or len(self._being_written) >= WRITING:
            return
        refusal = None
        if propose.undo:
            propose, undoes, refusal = undo_proposal(propose, self._update_log.state, self.revision)
        refusal = refusal or proposal_checks.refusal(
            propose, self._update_log.state, self._membership.leader, self.under_way, self.revision
        )
        if refusal:
            # The refusal is written to the journal before it is published, so that a restarted hub gives the same
            # answer.
            state = new_command(propose, self._update_log.state, self._membership.world, why=refusal)
            self._write(Issue(state, propose.expires_step))
            return
        # The revision is never assigned again, even if the write fails, because a failed write may still have reached
        # the disk.
        self._last_revision += 1
        run = self._update_log.state
        why = wait_reason(run, self._membership.leader)
        state = new_command(propose, run, self._membership.world, self._last_revision, why, undoes)
        self._write(Issue(state, propose.expires_step, early=run.board is None))

    def _write(self, issue: Issue) -> None:
        self._being_written[issue.state.id] = issue
        self._journal.insert(issue.entry)

    @property
    def under_way(self) -> list[CommandState]:
        """Accepted commands without a final result, including those that are still being written to the journal."""
        issues = [*self._waiting, *self._being_written.values()]
        return [issue.state for issue in issues if issue.state.state == "accepted"]

    @property
    def ready(self) -> bool:
        """Whether a leader is connected and the queue has room for another proposal."""
        return self._membership.leader is not None and len(self.under_way) < WAITING

    def unwritten(self, id: str) -> bool:
        """Whether a recent proposal was refused only because the journal could not be written."""
        return id in self._unwritten

    def publish_waiting(self) -> None:
        """Publish why the command at the head of the queue waits, whenever the reason changes. Called at each tick."""
        if self._waiting:
            issue, why = self._waiting[0], wait_reason(self._update_log.state, self._membership.leader)
            if why != issue.state.why:
                issue.state = structs.replace(issue.state, why=why)
                self._update_log.publish(issue.state)

    @property
    def revision(self) -> int:
        """The newest revision of the knobs that is in force, according to the knob board and the applied commands."""
        board, commands = self._update_log.state.board, self._update_log.state.commands.values()
        known = self._by_revision.values() if board else ()
        applied = [issue.state.revision for issue in known if issue.state.state == "applied"]
        if board is None:  # a restarted hub has only the journal at first
            applied = [command.revision for command in commands if command.state == "applied"]
        return max(board.revision if board else 0, max(applied, default=0))

    def journal_wrote(self, written: Written) -> None:
        """Handle the journal's result for a proposal: written, or failed."""
        issue = self._being_written.pop(written.entry.state.id)
        if written.known:
            self._update_log.publish(written.known)
        elif written.error:
            self._unwritten.append(issue.state.id)
            self._update_log.publish(
                structs.replace(
                    issue.state,
                    state="rejected",
                    revision=0,
                    why=issue.state.why if issue.state.state == "rejected" else clip(written.error),
                    time_s=time.time(),
                )
            )
        elif issue.state.state == "rejected":
            self._update_log.publish(issue.state)
        elif self.ended is not None:
            self._expire(issue)
        else:
            self._waiting.append(issue)
            self._track(issue)
            self._update_log.publish(issue.state)

    # ---------------------------------------------------------------------------------- commands and their acks

    def next_command(self, now: float) -> Command | None:
        """The command to send to the leader now, or None. This is the first command in the queue, which is resent every
        RESEND_S seconds."""
        if not self._waiting or self._membership.leader is None:
            return None
        issue = self._waiting[0]
        state = issue.state
        revision, sent_s = self._sent
        if state.revision == revision and now - sent_s < RESEND_S:
            return None
        board = self._update_log.state.board
        if board and board.revision < state.revision:
            # All earlier commands are settled, so this command replaces the current values.
            issue.state = structs.replace(
                state, before=values_in_force(self._update_log.state, state.changes)
            )
        issue.sent = True
        self._sent = (state.revision, now)
        return Command(state.revision, state.id, state.changes, issue.expires_step)

    def resend_now(self) -> None:
        """Send the command at the head of the queue again, without waiting for `RESEND_S`. Called when the leader has
        sent a new hello."""
        self._sent = (0, 0.0)

    def ack(self, ack: Ack) -> None:
        """Handle a rank's ack of a command. All ranks must report the same result; an ack with a different result
        causes an error event.
        """
        issue = self._by_revision.get(ack.revision)
        if issue is None or ack.rank in issue.acked or not (issue.sent or issue.from_journal):
            return
        leader = self._membership.leader
        leads = leader is not None and leader.rank == ack.rank
        if ack.state == "agreed":
            if issue in self._waiting:  # later commands need not wait for it
                self._waiting.remove(issue)
                issue.agreed, issue.state = True, structs.replace(issue.state, why=ack.why)
                self._update_log.publish(issue.state)
            return
        if issue.state.state == "accepted" and ack.state != "applied" and not leads:
            issue.held_acks[ack.rank] = ack  # only the leader's ack may reject a command
            return
        if issue.state.state == "accepted":
            issue.settle(ack, self._membership.world)
            if not issue.agreed:
                self._waiting.remove(issue)
            self._publish(issue)
            for held_acks in list(issue.held_acks.values()):
                self.ack(held_acks)
        elif error := issue.add_ack(ack):
            self._log_error(error)

    def publish_acks(self) -> None:
        """Publish the acks received since the last call: one CommandState per command."""
        for issue in self._by_revision.values():
            if issue.unpublished:
                self._publish(issue)

    def _publish(self, issue: Issue) -> None:
        issue.unpublished = False
        issue.count()
        self._update_log.publish(issue.state)
        if issue.needs_journalling:
            self._journal_state(issue)

    def _journal_state(self, issue: Issue) -> None:
        issue.journalled = issue.state
        self._journal.update(issue.entry)

    def journal_counts(self) -> None:
        """Write the ack counts of partially acknowledged commands to the journal; called at each tick and at the end of
        the run.
        """
        for issue in self._by_revision.values():
            if issue.counts_outdated:
                self._journal_state(issue)

    def leader_began(self, leader: Hello) -> None:
        """Called when the leader rank has connected to the hub. Commands that the previous leader process was executing
        go back into the queue, and the states of commands are updated. A run resumed from a checkpoint has the knob
        values of the checkpoint, so newer commands are marked as rolled back, or as expired if they were not applied
        yet; none of them is applied again.
        """
        self.ended = None
        # The commands that the previous leader process was executing; that process has ended.
        for one in [one for one in self._by_revision.values() if one.under_way]:
            one.agreed = False
            self._waiting.appendleft(one)
        for state in list(self._update_log.state.commands.values()):
            new = resumed_state(state, self._by_revision.get(state.revision), leader)
            if new is None:
                continue
            state = new
            self._waiting = deque(one for one in self._waiting if one.state.id != state.id)
            self._by_revision.pop(state.revision, None)
            state = structs.replace(state, time_s=time.time())
            self._update_log.publish(state)
            self._journal.update(Entry(state))

    def leader_ended(self, cause: str = "") -> None:
        """Expire every pending command, because the leader has left, has died or never connected. `cause`: one
        sentence.
        """
        self.ended = f": {cause}" if cause else ""
        self._waiting.clear()
        self.publish_acks()  # acks of the last round are counted too
        for issue in self._by_revision.values():
            if issue.state.state == "accepted":
                self._expire(issue)
            elif issue.partial and not issue.state.final and not issue.state.why:
                why = f"the run ended before every rank had acknowledged{self.ended}"
                issue.state = structs.replace(issue.state, why=clip(why))
                self._publish(issue)

    def _expire(self, issue: Issue) -> None:
        why = f"the run ended before the change was applied{self.ended or ''}"
        issue.state = structs.replace(issue.state, state="expired", why=clip(why))
        self._publish(issue)

    def ack_missing(self, rank: int) -> bool:
        """Whether the rank may have sent an ack to the previous hub process that this hub process does not know."""
        from_journal = (issue for issue in self._by_revision.values() if issue.from_journal)
        return any(not issue.state.settled and rank not in issue.acked for issue in from_journal)

    def rank_lost(self, rank: int) -> None:
        """For each command that this rank has not acknowledged, note that the rank was lost before its ack."""
        for issue in self._by_revision.values():
            if issue.partial and rank not in issue.acked:
                issue.state = structs.replace(issue.state, why=lost_before_ack(rank))
                issue.unpublished = True

    def note_revision(self, revision: int) -> None:
        """Record a revision that a rank reports, so that the hub does not assign this revision again, even if the
        journal lacks it."""
        if revision <= LARGEST_REVISION:
            self._last_revision = max(self._last_revision, revision)

    def _track(self, issue: Issue) -> None:
        self._by_revision[issue.state.revision] = issue
        if len(self._by_revision) > TRACKED:
            del self._by_revision[next(iter(self._by_revision))]

    def _log_error(self, text: str) -> None:
        self._update_log.publish(Event(time.time(), "error", "hub", text))
