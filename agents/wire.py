"""Every message that crosses a socket: typed, versioned, plain msgpack.

A frame is one msgpack value ``[version, [message, ...]]``; a message is ``[kind, field, ...]`` (an array-like
Struct), so a newer peer may append fields and an older one ignores them. Batches are lists inside one frame,
never multipart. `codec.decode` is the only way in: it checks size, version and types before anything is looked at.

Units: ``_ms`` milliseconds, ``bytes`` bytes sent to other ranks, times ``_s`` seconds since the epoch.
``None`` is "no data" and is never the same as zero.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from agents.terms import FRAME_BYTES as FRAME_BYTES
from agents.terms import MAX_FRAME_BYTES as MAX_FRAME_BYTES
from agents.terms import MESSAGE_BYTES as MESSAGE_BYTES
from agents.terms import TEXT as TEXT
from agents.terms import VERSION as VERSION
from agents.terms import Changes as Changes
from agents.terms import Coords as Coords
from agents.terms import Count as Count
from agents.terms import Facts as Facts
from agents.terms import FiniteValue as FiniteValue
from agents.terms import Message as Message
from agents.terms import Name as Name
from agents.terms import Parts as Parts
from agents.terms import Phases as Phases
from agents.terms import Rank as Rank
from agents.terms import Real as Real
from agents.terms import Revision as Revision
from agents.terms import Text as Text
from agents.terms import Unknown as Unknown
from agents.terms import Value as Value
from agents.terms import WireError as WireError
from agents.terms import clip as clip
from agents.terms import spell as spell
from agents.wire_control import PAUSED as PAUSED
from agents.wire_control import PREVIEWS as PREVIEWS
from agents.wire_control import Ack as Ack
from agents.wire_control import Command as Command
from agents.wire_control import CommandState as CommandState
from agents.wire_control import Decide as Decide
from agents.wire_control import Estimate as Estimate
from agents.wire_control import Preview as Preview
from agents.wire_control import Previewed as Previewed
from agents.wire_control import Propose as Propose
from agents.wire_control import TrialState as TrialState
from agents.wire_control import Try as Try
from agents.wire_measures import ExpertShare as ExpertShare
from agents.wire_measures import Loads as Loads
from agents.wire_measures import LoadSummary as LoadSummary
from agents.wire_measures import Sample as Sample
from agents.wire_measures import Vitals as Vitals

# ------------------------------------------------------------------------------------------------ knobs


class Legal(Struct, array_like=True, frozen=True):
    """What a knob may be set to: one of `choices`, or a number in [low, high]; and `none` if `optional`."""

    choices: Annotated[list[Value], Meta(max_length=256)] = []
    low: float | None = None
    high: float | None = None
    optional: bool = False

    def __str__(self) -> str:
        words = [spell(choice) for choice in self.choices]
        if self.low is not None and self.high is not None:
            words.append(f"{self.low:g} to {self.high:g}")
        if self.optional:
            words.append("none")
        return ", ".join(words)

    def admits(self, value: Value) -> bool:
        if value is None:
            return self.optional
        if any(value == choice and type(value) is type(choice) for choice in self.choices):
            return True
        if isinstance(value, bool | str) or self.low is None or self.high is None:
            return False
        return self.low <= value <= self.high


class KnobState(Struct, array_like=True, frozen=True, gc=False):
    """One row of the knob board, with what is legal now, given the whole board and the layout."""

    name: Name
    value: FiniteValue
    legal: Legal
    loss_neutral: bool
    about: Text = ""
    action: bool = False  # done once when it is set, and holds no value

    def refusal(self, value: Value) -> str | None:
        """One sentence when `value` is not legal, else None."""
        if self.legal.admits(value):
            return None
        return f"{self.name} = {spell(value)} is not legal; legal: {self.legal}"


# ------------------------------------------------------------------------------------ from ranks, to watchers


class Hello(Message, frozen=True):
    """A rank introduces itself: on connecting, and again whenever a hub asks."""

    version: int
    run: Name
    rank: Rank
    world: Rank
    coords: Coords  # axis -> coordinate, outermost first, e.g. {"pp": 1, "dp": 0, "tp": 1}
    host: Text
    pid: Count
    device: Text
    layout: Text  # digest of layout and data; ranks that differ are not one run
    revision: Revision  # the last applied knob revision
    step: Count
    leader: bool
    facts: Facts = {}  # what a screen shows of the run: model size, cores, schedule ...
    capabilities: Annotated[list[Name], Meta(max_length=64)] = []
    began_s: float = 0.0  # when this process of the run began to train, by its own clock; 0: it does not say
    age_s: float | None = (
        None  # how long ago that was when this was sent: the only word on it that two machines share
    )


class Board(Message, frozen=True):
    """The knob board in force, from the leader: on hello and after each applied revision."""

    rank: Rank
    revision: Revision
    digest: Name
    knobs: Annotated[list[KnobState], Meta(max_length=256)]


class Traffic(Struct, array_like=True, frozen=True):
    """One axis of one step: bytes sent to other ranks, time in collectives, the part compute did not hide."""

    bytes: Count
    ms: Real
    exposed_ms: Real


Comm = Annotated[dict[Name, Traffic], Meta(max_length=16)]
"""Traffic by axis: dp, tp, pp, ep, cp, control."""


class Step(Message, frozen=True):
    """What one rank measured in one step."""

    rank: Rank
    step: Count
    seq: Count
    revision: Revision
    step_ms: Real
    phases: Phases  # ms by phase
    tokens: Count | None  # tokens this rank's batch slice held
    comm: Comm
    a2a_bytes: Count | None = None
    bubble: Real | None = None  # 1 - busy / window of its pipeline, 0..1
    bubble_bound: Real | None = None
    dropped: Count | None = None  # routed (token, expert) pairs over capacity
    memory_bytes: Count | None = None
    lost_records: Count = 0  # records this agent dropped because its queue was full
    bubble_parts: Parts | None = (
        None  # schedule, wait, overhead: shares of the window that add up to `bubble`
    )
    tokens_per_s: Real | None = None  # of this rank's batch slice
    mfu: Real | None = None  # what this rank computed over what its device could
    loss: float | None = None  # where each rank has one of its own; the job's is the summary's


class Summary(Message, frozen=True):
    """One step of the whole job, from rank 0: the record that `engine run --json` prints."""

    step: Count
    revision: Revision
    time_s: Real
    loss: float | None
    grad_norm: float | None
    step_ms: Real  # of the slowest rank
    tokens_per_s: Real | None
    mfu: Real | None
    bubble: Real | None
    bubble_bound: Real | None
    oversubscribed: bool
    a2a_bytes: Count | None
    comm: Comm
    dropped: Count | None
    load_max_over_mean: Real | None
    knobs: Facts
    lr: Real | None = None
    skipped: bool = False  # the gradient was not finite, and the weights were left as they were
    bubble_parts: Parts | None = None  # as a rank's, mean over ranks


class LayerLoad(Struct, array_like=True, frozen=True, gc=False):
    """Where one layer's router sent its tokens, over the whole job: `load[e]` of (token, expert) pairs."""

    layer: Count
    load: Annotated[list[Count], Meta(max_length=4096)]
    dropped: Count


class Experts(Message, frozen=True):
    """Expert load by layer, over all ranks (rank 0 sends it)."""

    step: Count
    layers: Annotated[list[LayerLoad], Meta(max_length=1024)]


class Action(Struct, array_like=True, frozen=True, gc=False):
    """One pipeline action: kind F, B or W of a micro-batch, in ms since the pipeline window opened. Where W comes
    by itself, B is the input gradients alone."""

    kind: Literal["F", "B", "W"]
    micro_batch: Count
    start_ms: Real
    end_ms: Real
    stage: Count = 0  # of the whole pipeline; a rank may hold several


class Timeline(Message, frozen=True):
    """The pipeline actions of one rank in one step (sampled)."""

    rank: Rank
    step: Count
    window_ms: Real
    actions: Annotated[list[Action], Meta(max_length=8192)]


class ToPeer(Struct, array_like=True, frozen=True, gc=False):
    """Bytes to one other rank."""

    peer: Rank
    bytes: Count


class Peers(Message, frozen=True):
    """To whom one rank sent its all-to-all bytes in one step (sampled); their sum is the step's `a2a_bytes`."""

    rank: Rank
    step: Count
    sent: Annotated[list[ToPeer], Meta(max_length=8192)]


class Pulse(Message, frozen=True):
    """From a rank's own thread, once a second, whatever the trainer does."""

    rank: Rank
    step: Count
    doing: Text  # "tp all-gather, layer 2, micro-batch 1"
    since_ms: Real  # how long it has been doing that
    cpu_percent: Real | None = None


class Event(Message, frozen=True):
    """Something a person should know."""

    time_s: Real
    level: Literal["info", "warning", "error"]
    source: Text  # "hub", "rank 3"
    text: Text


class Alert(Message, frozen=True):
    """Something the hub has found and holds to be so: raised, now and then told anew, and at last not `active`."""

    name: Name  # of the detector: "straggler", "stall", ...
    subject: Name  # what it is about: "rank 3", "layer 2", "run"; both together are the alert's key
    level: Literal["warning", "error"]
    active: bool
    step: Count  # of the run when it was found
    time_s: Real  # of this word on it
    text: Text  # one sentence, with its evidence
    evidence: Facts = {}  # the numbers behind the sentence
    ranks: Annotated[list[Rank], Meta(max_length=64)] = []  # the first of those it is about


class Gone(Message, frozen=True):
    """The hub lost sight of a rank, or the rank said goodbye (`clean`)."""

    rank: Rank
    clean: bool
    text: Text = ""
    process: Literal["unknown", "ended", "stopped", "alive"] = "unknown"  # as the hub's machine sees it

    @property
    def over(self) -> bool:
        """It will not be heard again; a suspended or silent process may be."""
        return self.clean or self.process not in ("stopped", "alive")


# ------------------------------------------------------------------------------------- hub <-> rank, client


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
