"""What ranks say, checked before it is believed: who speaks, for whom, and whether the numbers can be."""

import math
import time
from collections.abc import Callable, Iterable

from msgspec import structs

from agents.complaints import Complaints
from agents.control import Control
from agents.questions import Questions
from agents.roster import Roster
from agents.sequence import Sequence
from agents.wire import (
    Ack,
    AnyMessage,
    Board,
    Event,
    Experts,
    Gone,
    Hello,
    Loads,
    LoadSummary,
    Message,
    Peers,
    Previewed,
    Pulse,
    Refused,
    Step,
    Summary,
    Timeline,
    Traffic,
    Unknown,
    Update,
    Vitals,
    Welcome,
    WireError,
    clip,
)

# Those that name their rank, which must be the speaker's.
OF_ITSELF = (Step, Pulse, Vitals, Timeline, Peers, Board, Gone, Ack)
OF_THE_JOB = (Summary, Experts, Loads, Previewed)  # speak for all ranks, and only rank 0 or the leader may


def _traffic(comm: Iterable[Traffic]) -> Iterable[float | None]:
    for traffic in comm:
        yield traffic.ms
        yield traffic.exposed_ms


def _parts(message: Step | Summary) -> Iterable[float]:
    return (message.bubble_parts or {}).values()


def _shares(load: LoadSummary) -> Iterable[float]:
    return (top.share for top in load.top)


# The numbers of each message that have to be finite. A loss or a gradient norm need not be: that is news.
FINITE: dict[type[Message], Callable[..., Iterable[float | None]]] = {
    Step: lambda m: (
        *(m.step_ms, m.bubble, m.bubble_bound, m.tokens_per_s, m.mfu, *m.phases.values(), *_parts(m)),
        *_traffic(m.comm.values()),
    ),
    Summary: lambda m: (
        *(m.time_s, m.step_ms, m.tokens_per_s, m.mfu, m.bubble, m.bubble_bound, m.load_max_over_mean, m.lr),
        *_parts(m),
        *_traffic(m.comm.values()),
    ),
    Pulse: lambda m: (m.since_ms, m.cpu_percent),
    Vitals: lambda m: (m.device_percent, m.power_w, m.power_limit_w, m.temperature_c, m.host_cpu_percent),
    Loads: lambda m: (x for one in m.layers for x in (one.max_over_mean, one.cv, one.entropy, *_shares(one))),
    Event: lambda m: (m.time_s,),
    Previewed: lambda m: (x for e in m.estimates for x in (e.now, e.after, e.low, e.high)),
    Timeline: lambda m: (m.window_ms, *(edge for a in m.actions for edge in (a.start_ms, a.end_ms))),
    Board: lambda m: (k.value for k in m.knobs if isinstance(k.value, float)),
}


def all_finite(message: Message) -> bool:
    """Whether every number that has to be is neither NaN nor infinite."""
    numbers = FINITE.get(type(message))
    return numbers is None or all(number is None or math.isfinite(number) for number in numbers(message))


def _by_our_clock(hello: Hello) -> Hello:
    """When the process began, by the clock of this machine, which is the one that commands are stamped with."""
    return hello if hello.age_s is None else structs.replace(hello, began_s=time.time() - hello.age_s)


class Intake:
    """Takes what ranks send, a frame at a time; what it accepts is published, the rest complained of."""

    def __init__(
        self,
        sequence: Sequence,
        roster: Roster,
        control: Control,
        complaints: Complaints,
        questions: Questions,
    ) -> None:
        self._sequence = sequence
        self._roster = roster
        self._control = control
        self._complaints = complaints
        self._questions = questions

    def take(self, identity: bytes, messages: list[AnyMessage], now: float) -> list[Message]:
        """Take what one connection sent in one frame; returns what to answer."""
        for message in messages:
            if isinstance(message, Hello):
                refusal = self._roster.hello(identity, message, now)
                if refusal:
                    self._complaints.add("refused", refusal)
                    return [Refused(clip(refusal))]
                self._control.seen_revision(message.revision)
                known = _by_our_clock(message)
                if message.leader:
                    self._control.leader_began(known)
                    self._control.hurry()
                self._publish(known)
                continue
            speaker, was_lost = self._roster.heard(identity, now)
            if speaker is None:
                # The hub has started anew, or the rank was given up: it is asked to say hello, once a frame.
                return [Welcome(self._sequence.epoch)]
            if was_lost:
                self._publish(speaker)
                self._publish(Event(time.time(), "info", "hub", f"rank {speaker.rank} is heard again"))
            if self._believable(speaker, message):
                self._accept(identity, speaker, message)
        return []

    def _believable(self, speaker: Hello, message: AnyMessage) -> bool:
        me = f"rank {speaker.rank}"
        kind = type(message).__name__.lower()
        if isinstance(message, OF_ITSELF):
            if message.rank != speaker.rank:
                self._complaints.add(
                    "rank", f"{me} sent a {kind} in the name of rank {message.rank}; dropped"
                )
                return False
            if isinstance(message, Peers) and any(to.peer >= speaker.world for to in message.sent):
                self._complaints.add("peers", f"{me} sent to ranks that this run does not have; dropped")
                return False
        elif isinstance(message, OF_THE_JOB):
            if speaker.rank != 0 and not speaker.leader:
                self._complaints.add("rank", f"{me} sent a {kind}, which rank 0 or the leader sends; dropped")
                return False
        elif isinstance(message, Unknown):
            newer = f"{me} sent a message of kind {message.kind!r}, which this hub does not know; ignored"
            self._complaints.add("newer", newer)
            return False
        elif not isinstance(message, Event):
            self._complaints.add("kind", f"{me} sent a {kind}, which ranks do not send; dropped")
            return False
        if isinstance(message, Board) and not speaker.leader:
            self._complaints.add("rank", f"{me} sent a knob board, which only the leader sends; dropped")
            return False
        if not all_finite(message):
            self._complaints.add("number", f"{me} sent a {kind} with a number that is not finite; dropped")
            return False
        return True

    def _accept(self, identity: bytes, speaker: Hello, message: AnyMessage) -> None:
        match message:
            case Ack():
                self._control.ack(message)
            case Previewed():
                self._questions.answer(message)
            case Event():
                # The log is in the order of the hub's clock; a rank's may be an hour off.
                here = structs.replace(message, source=f"rank {speaker.rank}", time_s=time.time())
                self._publish(here)
            case Gone():
                self._roster.leave(identity)
                self._publish(structs.replace(message, clean=True))
                if speaker.leader:
                    self._control.leader_ended()
            case Board():
                self._control.seen_revision(message.revision)
                self._publish(message)
            case Step() | Summary() | Experts() | Loads() | Timeline() | Peers() | Pulse() | Vitals():
                self._publish(message)

    def _publish(self, update: Update) -> None:
        try:
            self._sequence.publish(update)
        except WireError as error:
            self._complaints.add("size", f"{error}; dropped")
