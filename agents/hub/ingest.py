"""Ingest: checks the sender, the rank and the values of messages from ranks, and publishes the messages."""

import time

from msgspec import structs

from agents.alerts.finding import names_of
from agents.hub.commands.control import Control
from agents.hub.commands.preview_queries import PreviewQueries
from agents.hub.commands.stack_queries import StackQueries
from agents.hub.rate_limit import RateLimit
from agents.hub.telemetry.allowed_records import OfItself, OfTheJob
from agents.hub.telemetry.dropped import DroppedSteps
from agents.hub.telemetry.membership import Connection, Known, Membership
from agents.hub.telemetry.peer_faults import PeerFaults
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import (
    Ack,
    AnyMessage,
    Board,
    Event,
    Experts,
    Farewell,
    Gone,
    Hello,
    Loads,
    Message,
    Peers,
    Previewed,
    Pulse,
    RankStacks,
    Refused,
    Relay,
    Step,
    Summary,
    Timeline,
    Unknown,
    Update,
    Vitals,
    Welcome,
    WireError,
    clip,
    codec,
)
from agents.protocol.codec import Skimmed

WELCOME_RANKS = 4096  # maximum number of ranks in one Welcome or Farewell to a relay
HELLOS_A_SECOND = 64  # maximum for one rank on one connection; a rank sends one hello per applied change
# From this many ranks on, records are decoded only when read, because newer ones replace most of them first.
LARGE_WORLD = 256
EVENTS_A_SECOND = 64  # maximum for one rank; further events are dropped


MOST_OFFSET_S = 1e10  # between the clocks of a rank and of this machine


class Ingest:
    """Handles the frames of ranks: publishes valid messages, and reports invalid ones in the run's log."""

    def __init__(
        self,
        update_log: UpdateLog,
        membership: Membership,
        control: Control,
        peer_faults: PeerFaults,
        preview_queries: PreviewQueries,
        stack_queries: StackQueries,
        first_hub: bool = False,
    ) -> None:
        self._update_log = update_log
        self._membership = membership
        self._control = control
        self._peer_faults = peer_faults
        self._preview_queries = preview_queries
        self._stack_queries = stack_queries
        self._records = Skimmed([], [], [])  # records that were received but are not published yet
        self._heard_again: list[int] = []  # ranks that were lost and have sent again, not reported yet
        self._hellos = RateLimit(HELLOS_A_SECOND)
        self._events = RateLimit(EVENTS_A_SECOND)
        self.dropped = DroppedSteps(first_hub)
        self._left: list[int] = []  # ranks whose Gone is in the current frame
        self._offsets: dict[int, float] = {}  # by rank: what to add to its times to convert them to our clock
        self._seen: set[int] = set()  # ranks that have sent a hello to this hub process

    def take_records(self, identity: bytes, frame: bytes, now: float) -> bool:
        """Fast path for large runs: collect the records of a frame that contains only small records of this
        connection's ranks. For any other frame, return False. Call `flush` afterwards.
        """
        connection = self._membership.connection(identity) if self._membership.world >= LARGE_WORLD else None
        records = codec.skim(frame) if connection else None
        if connection is None or records is None:
            return False
        ranks = connection.ranks
        for rank in set(records.ranks):
            known = ranks.get(rank)
            if known is None or known.lost:
                return False
            known.heard_s = now
        self._records.extend(records)
        return True

    def flush(self) -> None:
        """Publish the collected records in one batch, which is cheaper than publishing them one by one."""
        if self._records:
            self._update_log.publish_records(self._records)
            self._records = Skimmed([], [], [])

    def report_heard_again(self) -> None:
        """Publish one event for all ranks that have resumed sending, because a whole cluster may have been cut off."""
        if not self._heard_again:
            return
        ranks, self._heard_again = sorted(self._heard_again), []
        text = f"{names_of(self._update_log.state, ranks)} {'sends' if len(ranks) == 1 else 'send'} again"
        self._publish(Event(time.time(), "info", "hub", text))

    def report_malformed(self) -> None:
        """Report each collected record that was found to be malformed when it was decoded."""
        malformed = self._update_log.newest.malformed
        while malformed:
            rank, found = malformed.popleft()
            self._report_malformed(rank, found)

    def take(self, identity: bytes, messages: list[AnyMessage], now: float) -> list[Message]:
        """Handle the messages of one frame; returns the answers."""
        self.flush()
        connection = self._membership.connection(identity)
        unknown_senders: list[Message] = []
        answers: list[Message] = []
        for message in messages:
            if isinstance(message, Hello) and not self._hellos.allows((identity, message.rank), now):
                self._peer_faults.add("rank", f"rank {message.rank} sends too many hellos; dropped")
            elif isinstance(message, Hello | Relay):
                refusal = self._introduce(identity, message, now)
                connection = self._membership.connection(identity)
                if refusal is None:
                    if isinstance(message, Hello) and self._needs_welcome(message.rank):
                        through = [message.rank] if connection and connection.relay else []
                        answers.append(Welcome(self._update_log.epoch, through))
                    continue
                answers.append(refusal)
                if connection is None or not connection.relay:
                    return answers
            elif connection is None and isinstance(message, Unknown) and message.why:
                raise WireError(f"not a frame of this protocol: {message.why}")
            elif connection is None:
                # The hub has restarted, or the rank was removed as lost: request its hello, once per frame.
                return [Welcome(self._update_log.epoch)]
            else:
                sender = _sender(connection, message)
                if sender:
                    self._receive(sender, message, now)
                else:
                    unknown_senders.append(message)
        if unknown_senders:
            answers += self._welcome_unknown(unknown_senders)
        return answers + self._farewells()

    def _farewells(self) -> list[Message]:
        """Tell the ranks that have left that their last messages have arrived."""
        left, self._left = self._left, []
        return [Farewell(left[at : at + WELCOME_RANKS]) for at in range(0, len(left), WELCOME_RANKS)]

    def _introduce(self, identity: bytes, message: Hello | Relay, now: float) -> Refused | None:
        if isinstance(message, Relay):
            refusal = self._membership.relay(identity, message)
        else:
            refusal = self._membership.hello(identity, message, now)
        if refusal:
            self._peer_faults.add("refused", refusal)
            return Refused(clip(refusal), None if isinstance(message, Relay) else message.rank)
        if isinstance(message, Hello):
            self._control.note_revision(message.revision)
            known = self._membership.hello_of(message.rank)
            offset = known.began_s - message.began_s
            self._offsets[message.rank] = offset if abs(offset) < MOST_OFFSET_S else 0.0
            if known.leader:
                self._control.leader_began(known)
                self._control.resend_now()
            self._publish(known)
        return None

    def _needs_welcome(self, rank: int) -> bool:
        """Whether to request a new hello. With the new hello, the rank sends again the acks that it may have sent to
        the previous hub process.
        """
        if rank in self._seen:
            return False
        self._seen.add(rank)
        return self._control.ack_missing(rank)

    def _welcome_unknown(self, unknown_senders: list[Message]) -> list[Message]:
        """Request hellos from the ranks that sent messages through this relay before they sent a hello."""
        ranks = {one.rank for one in unknown_senders if isinstance(one, OfItself)}
        if len(ranks) < len(unknown_senders):
            self._peer_faults.add("rank", "a relay sent records of ranks that it has not registered; dropped")
        return [Welcome(self._update_log.epoch, sorted(ranks)[:WELCOME_RANKS])] if ranks else []

    def _receive(self, sender: Known, message: AnyMessage, now: float) -> None:
        if sender.mark_heard(now):
            self._publish(sender.hello)
            self._heard_again.append(sender.hello.rank)
        if self._check(sender.hello, message):
            if isinstance(message, Event) and not self._events.allows(sender.hello.rank, now):
                self._peer_faults.add(
                    "rank", f"rank {sender.hello.rank} sends more than {EVENTS_A_SECOND} events/s; dropped"
                )
                return
            self._accept(sender.hello, message)

    def _check(self, sender: Hello, message: AnyMessage) -> bool:
        me = f"rank {sender.rank}"
        kind = type(message).__name__.lower()
        if isinstance(message, OfItself):
            if message.rank != sender.rank:
                self._peer_faults.add("rank", f"{me} sent a {kind} on behalf of rank {message.rank}; dropped")
                return False
            if isinstance(message, Peers) and any(to.peer >= sender.world for to in message.sent):
                self._peer_faults.add("peers", f"{me} sent to ranks that this run does not have; dropped")
                return False
        elif isinstance(message, OfTheJob):
            if sender.rank != 0 and not sender.leader:
                self._peer_faults.add(
                    "rank", f"{me} sent a {kind}, which only rank 0 or the leader may send; dropped"
                )
                return False
        elif isinstance(message, Unknown):
            if message.why:
                self._report_malformed(sender.rank, message)
            else:
                newer = f"{me} sent a message of kind {message.kind!r}, which this hub does not know; ignored"
                self._peer_faults.add("newer", newer)
            return False
        elif not isinstance(message, Event):
            self._peer_faults.add("kind", f"{me} sent a {kind}, which ranks may not send; dropped")
            return False
        if isinstance(message, Board) and not sender.leader:
            self._peer_faults.add("rank", f"{me} sent a knob board, which only the leader may send; dropped")
            return False
        return True

    def _report_malformed(self, rank: int, malformed: Unknown) -> None:
        what = f"an invalid {malformed.kind}: {malformed.why}"
        self._peer_faults.add("number", f"rank {rank} sent {what}; dropped")

    def _accept(self, sender: Hello, message: AnyMessage) -> None:
        match message:
            case Ack():
                self._control.ack(message)
            case Previewed():
                self._preview_queries.answer(message)
            case RankStacks():
                self._stack_queries.take(message)
            case Event():
                # Events get the hub's time, because the clock of a rank may be wrong by an hour.
                here = structs.replace(message, source=f"rank {sender.rank}", time_s=time.time())
                self._publish(here)
            case Gone():
                self._membership.leave(sender.rank)
                self._left.append(sender.rank)
                again = message.process == "restarting"
                process = message.process if again else "unknown"
                self._publish(structs.replace(message, clean=not again, process=process))
                if sender.leader and not again:
                    self._control.leader_ended()
            case Board():
                self._control.note_revision(message.revision)
                self._publish(message)
            case Step():
                self.dropped.note(sender, message, self._membership.world < LARGE_WORLD)
                self._publish(message)
            case Summary():
                time_s = message.time_s + self._offsets.get(sender.rank, 0.0)
                self._publish(structs.replace(message, time_s=time_s))
            case Experts() | Loads() | Timeline() | Peers() | Pulse() | Vitals():
                self._publish(message)

    def _publish(self, update: Update) -> None:
        try:
            self._update_log.publish(update)
        except WireError as error:
            self._peer_faults.add("size", f"{error}; dropped")


def _sender(connection: Connection, message: AnyMessage) -> Known | None:
    """The rank that sent the message, if this connection may send for it; `_check` then validates the message."""
    if not connection.relay:
        return connection.only
    if isinstance(message, OfItself):
        return connection.ranks.get(message.rank)
    if isinstance(message, Event):
        number = message.source.removeprefix("rank ")
        return connection.ranks.get(int(number)) if number.isdecimal() and len(number) < 9 else None
    if isinstance(message, OfTheJob):
        return next((one for rank, one in connection.ranks.items() if one.hello.leader or rank == 0), None)
    return next(iter(connection.ranks.values()), None)
