"""What ranks say of themselves and of the job, and what the hub has to say of them: passed on to who watches."""

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from agents.protocol.base import (
    Coords,
    Count,
    Facts,
    Message,
    Name,
    Parts,
    Phases,
    Rank,
    Real,
    Revision,
    Text,
)
from agents.protocol.knobs import KnobState


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

    @property
    def waited_ms(self) -> float:
        """What this rank waited for others, in collectives and for its pipeline neighbours, where nothing hid it."""
        return sum(traffic.exposed_ms for traffic in self.comm.values())

    @property
    def own_ms(self) -> float:
        """The step less what it waited. Everybody's step takes as long as the slowest's; own time tells them apart."""
        return max(0.0, self.step_ms - self.waited_ms)


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
    """From a thread of the rank's own, once a second. A call into C that holds Python's lock (the GIL) stops it too."""

    rank: Rank
    step: Count
    doing: Text  # "tp all-gather, layer 2, micro-batch 1"
    since_ms: Real  # how long it has been doing that
    cpu_percent: Real | None = None


CHECKPOINT_STEP: Final = "checkpoint_step"
"""The fact of an event that tells of a checkpoint on disk: the steps that had been done when it was saved."""


class Event(Message, frozen=True):
    """Something a person should know."""

    time_s: Real
    level: Literal["info", "warning", "error"]
    source: Text  # "hub", "rank 3"
    text: Text
    facts: Facts = {}  # what a program may want of it: CHECKPOINT_STEP


class Bucketed(Struct, array_like=True, frozen=True):
    """Part of a run's curve (`agents.state.curve`): of one metric's buckets of `width` steps what is kept, by step."""

    metric: Name
    width: Annotated[int, Meta(ge=1, le=2**53)]
    steps: Annotated[list[Count], Meta(max_length=8192)]
    values: Annotated[list[float], Meta(max_length=8192)]


class Recalled(Message, frozen=True):
    """Something older than all that is known by now: the past that a hub which was started again reads from the
    run's recording, and in a snapshot the curve before its newest summaries.

    Several of them go back in time, each oldest first in itself; `curve` is older than `summaries`.
    """

    summaries: Annotated[list[Summary], Meta(max_length=4096)] = []
    events: Annotated[list[Event], Meta(max_length=4096)] = []
    curve: Annotated[list[Bucketed], Meta(max_length=64)] = []


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
        """It will not be heard again. A suspended or silent process may be, and so may one that cannot be looked at."""
        return self.clean or self.process == "ended"
