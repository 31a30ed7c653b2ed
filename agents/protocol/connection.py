"""What a hub and its peers say to each other about their connection: welcomes, credit, updates, refusals."""

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


class Welcome(Message, frozen=True):
    """The hub asks a rank it does not know (after a hub start, say) to say hello.

    To a relay: `ranks` of its own are meant; none named: all of them, and the relay itself.
    """

    epoch: Name
    ranks: Annotated[list[Rank], Meta(max_length=4096)] = []


class Relay(Message, frozen=True):
    """A connection that speaks for several ranks: for those that say hello through it, and no others."""

    version: int
    run: Name
    host: Text
    pid: Count


class Credit(Message, frozen=True):
    """A client may receive `frames` more frames, and has every update of `epoch` up to `seq`.

    With `hz` it wants of each rank and kind only the newest, so many times a second; without `ranks` nothing of
    single ranks at all; and at most `frame_bytes` a frame (0: as a frame may have).
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
    """Updates of `epoch`, the last of which has number `seq`.

    `snapshot` counts down the frames of a snapshot, n .. 1 (whose updates rebuild the state from nothing; the
    first of them has `begins`); 0 is a run of live updates that follow on `seq - len(updates)`, and with no
    updates at all it is the hub's heartbeat. With `since`, updates between it and `seq` that newer ones replace
    are left out.
    """

    epoch: Name
    seq: Count
    updates: list[Update]
    begins: bool = False
    snapshot: Count = 0
    time_s: float = 0.0
    since: Count | None = None


class Refused(Message, frozen=True):
    """A peer whose frames the hub cannot take, and why, in a sentence. To a relay: which of its ranks; None: itself.
    To a client: the id of what it asked and may not ask."""

    why: Text
    rank: Rank | None = None
    asked: Annotated[str, Meta(max_length=64)] = ""


Control = Propose | Try | Decide | Preview | Previewed | Command | Ack
AnyMessage = Update | Control | Relay | Sample | Welcome | Credit | Updates | Refused
