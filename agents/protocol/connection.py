"""Messages about the connection between a hub and its peers: welcomes, credit, updates, refusals."""

from typing import Annotated

from msgspec import Meta

from agents.protocol.base import FRAME_BYTES, Count, Message, Name, Rank, Text, Unknown
from agents.protocol.commands import (
    Ack,
    Command,
    CommandState,
    Decide,
    Preview,
    Previewed,
    Propose,
    TrialState,
    Try,
)
from agents.protocol.measurements import Loads, Sample, Vitals
from agents.protocol.records import (
    Alert,
    Board,
    Event,
    Experts,
    Gone,
    Hello,
    Peers,
    Pulse,
    Recalled,
    Step,
    Summary,
    Timeline,
)
from agents.protocol.stacks import RankStacks, StackQuery, StacksCollected


class Welcome(Message, frozen=True):
    """The hub requests a Hello from a rank that it does not know, for example after a restart of the hub.

    A relay forwards this message to `ranks`, or to all ranks on its node if `ranks` is empty. The relay also introduces
    itself again (`Relay`), at the start of each frame that contains one of the requested hellos.
    """

    epoch: Name
    ranks: Annotated[list[Rank], Meta(max_length=4096)] = []


class Farewell(Message, frozen=True):
    """The hub has taken the `Gone` of these ranks, and all messages that they sent before it. A rank that leaves waits
    for this message, because a message that a socket has accepted may still be lost. A relay forwards it to `ranks`."""

    ranks: Annotated[list[Rank], Meta(max_length=4096)]


class Relay(Message, frozen=True):
    """A relay introduces itself: its connection carries the messages of all ranks that send their Hello through this
    relay."""

    version: int
    run: Name
    host: Text
    pid: Count


class Credit(Message, frozen=True):
    """A client tells the hub that it can receive `frames` more frames, and that it has every update of `epoch` up to
    `seq`.

    If `hz` is not 0, the client receives only the newest record of each rank and kind, `hz` times a second. Without
    `ranks`, the client receives no per-rank records. `frame_bytes` is the approximate maximum size of a frame (0: the
    limit of the protocol).
    """

    version: int
    epoch: str
    seq: Count
    frames: Annotated[int, Meta(ge=1, le=64)]
    hz: Annotated[float, Meta(ge=0, le=100)] = 0.0  # 0: every update
    ranks: bool = True
    frame_bytes: Annotated[int, Meta(ge=0, le=FRAME_BYTES)] = 0


Update = (
    Hello
    | Board
    | Step
    | Summary
    | Loads
    | Experts
    | Timeline
    | Peers
    | Pulse
    | Vitals
    | Event
    | Alert
    | Gone
    | CommandState
    | TrialState
    | Recalled
    | Unknown
)


class Updates(Message, frozen=True):
    """Updates of `epoch`; the last one has the sequence number `seq`.

    The updates of a snapshot rebuild the state, starting from an empty one. In the n frames of a snapshot, `snapshot`
    counts down from n to 1; `begins` is true in the first frame. If `snapshot` is 0, these are live updates, which
    follow update `seq - len(updates)`; an empty list is the hub's heartbeat. If `since` is given, the frame omits
    updates after `since` that newer updates replace.
    """

    epoch: Name
    seq: Count
    updates: list[Update]
    begins: bool = False
    snapshot: Count = 0
    time_s: float = 0.0
    since: Count | None = None


class Refused(Message, frozen=True):
    """The hub refuses a peer or its request; `why` is one sentence. `rank`: the refused rank, if the peer is a relay
    (None: the relay itself). `request_id`: the id of the refused request, if the peer is a client.
    """

    why: Text
    rank: Rank | None = None
    request_id: Annotated[str, Meta(max_length=64)] = ""


Control = Propose | Try | Decide | Preview | Previewed | Command | Ack
Stacks = StackQuery | RankStacks | StacksCollected
AnyMessage = Update | Control | Stacks | Relay | Sample | Welcome | Farewell | Credit | Updates | Refused
