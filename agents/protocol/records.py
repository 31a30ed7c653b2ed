"""Records that ranks send about themselves and the job, and records that the hub creates. The hub publishes all of
these records to its subscribers.
"""

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
    """A rank sends this message to introduce itself when it connects, and whenever a hub requests it."""

    version: int
    run: Name
    rank: Rank
    world: Rank
    coords: Coords  # axis -> coordinate, outermost first, e.g. {"pp": 1, "dp": 0, "tp": 1}
    host: Text
    pid: Count
    device: Text
    layout: Text  # digest of layout and data, equal on all ranks of a run
    revision: Revision  # the last applied knob revision
    step: Count
    leader: bool
    facts: Facts = {}  # properties of the run to show: model size, cores, schedule ...
    capabilities: Annotated[list[Name], Meta(max_length=64)] = []
    began_s: float = 0.0  # when this process began to train, by its own clock; 0: unknown
    # Seconds since `began_s` when this was sent; correct even if the clocks of machines differ.
    age_s: float | None = None
    simulated: bool = False  # nothing is trained: a simulation computes everything that this rank sends
    # How often the launcher has started the ranks of this run again; a hello with a larger number replaces all ranks.
    restarts: Count = 0
    # The number of the training's first step; a resumed part begins later.
    first_step: Annotated[int, Meta(ge=0, le=1)] = 0
    # The identity of the machine and of its process ids (`agents.rundir.local_machine`), because two machines may have
    # the same host name; "": unknown, or the process does not train.
    machine: Text = ""
    process_start: Count = 0  # when the process started, in clock ticks since the machine did; 0: unknown
    # Seconds from the first start of the ranks to `began_s`, if the launcher has restarted them; by a monotonic clock.
    earlier_s: Annotated[float, Meta(ge=0, le=1e10)] = 0.0

    @property
    def process(self) -> tuple[str, int, int]:
        """Identifies the process that sent this message."""
        return self.machine or self.host, self.pid, self.process_start


class Board(Message, frozen=True):
    """The knob board: all knobs with their values in force and their legal values. The leader sends this message with
    its hello and after each applied change of knobs."""

    rank: Rank
    revision: Revision
    digest: Name
    knobs: Annotated[list[KnobState], Meta(max_length=256)]


class Traffic(Struct, array_like=True, frozen=True, gc=False):
    """Traffic of one axis in one step: bytes sent to other ranks, time in collectives, and the exposed part of that
    time, which does not overlap with computation.
    """

    bytes: Count
    ms: Real
    exposed_ms: Real


Comm = Annotated[dict[Name, Traffic], Meta(max_length=16)]
"""Traffic by axis: dp, tp, pp, ep, cp, control."""


class Step(Message, frozen=True):
    """The measurements of one rank in one step."""

    rank: Rank
    step: Count
    seq: Count
    revision: Revision
    step_ms: Real
    phases: Phases  # ms by phase
    tokens: Count | None  # number of tokens in this rank's slice of the batch
    comm: Comm
    a2a_bytes: Count | None = None
    bubble: Real | None = None  # 1 - busy / window of its pipeline, 0..1
    bubble_bound: Real | None = None
    dropped: Count | None = None  # token-expert pairs dropped because their expert was over capacity
    memory_bytes: Count | None = None
    lost_records: Count = 0  # number of records that this agent dropped because its queue was full
    bubble_parts: Parts | None = None  # schedule, wait, overhead: shares of the window, with sum `bubble`
    tokens_per_s: Real | None = None  # throughput of this rank's slice of the batch
    mfu: Real | None = None  # achieved FLOP/s over the peak of the device
    loss: float | None = None  # this rank's loss, if it computes one; `Summary.loss` is the loss of the job
    grad_norm: float | None = (
        None  # the gradient norm that this rank computed; None if the update was skipped
    )

    @property
    def waited_ms(self) -> float:
        """Exposed time in collectives and pipeline transfers: the time in which this rank waited for other ranks
        without computing.
        """
        return sum(traffic.exposed_ms for traffic in self.comm.values())

    @property
    def own_ms(self) -> float:
        """Step time without the time spent waiting for other ranks. The step time itself is equal on all ranks, so only
        the time without waiting shows which rank is the slowest.
        """
        return max(0.0, self.step_ms - self.waited_ms)


class Summary(Message, frozen=True):
    """Measurements of one step of the whole job, sent by rank 0; `engine run --json` prints this record."""

    step: Count
    revision: Revision
    time_s: Real
    loss: float | None
    grad_norm: float | None
    step_ms: Real  # step time of the slowest rank
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
    skipped: bool = False  # the gradient was not finite, so the weights were not updated
    bubble_parts: Parts | None = None  # as in `Step`, mean over ranks
    # Loss of a text that the run does not train on, after this step; None: not measured.
    validation_loss: float | None = None
    loss_scale: Real | None = None  # factor on the loss in this step, with fp16
    # Number of skipped steps in the run so far; None: no such step, and no fp16.
    skipped_steps: Count | None = None
    # Bytes that all ranks sent to sum gradients over replicas; None without replicas.
    replica_bytes: Count | None = None
    replica_bytes_plain: Count | None = None  # bytes that this would take without compression
    # The ranks whose loss is not finite or, if there are none, whose gradient norm is not finite; at most 64.
    not_finite: Annotated[list[Rank], Meta(max_length=64)] = []


class LayerLoad(Struct, array_like=True, frozen=True, gc=False):
    """Expert load of one layer, summed over all ranks; `load[e]` is the number of tokens routed to expert e."""

    layer: Count
    load: Annotated[list[Count], Meta(max_length=4096)]
    dropped: Count


class Experts(Message, frozen=True):
    """The expert load of each layer over all ranks, sent by rank 0."""

    step: Count
    layers: Annotated[list[LayerLoad], Meta(max_length=1024)]


class Action(Struct, array_like=True, frozen=True, gc=False):
    """One pipeline action: its kind (F, B or W), its micro-batch, and its start and end in ms since the step's pipeline
    started.

    If the schedule has separate W actions, B computes only the input gradients.
    """

    kind: Literal["F", "B", "W"]
    micro_batch: Count
    start_ms: Real
    end_ms: Real
    stage: Count = 0  # index of the stage in the whole pipeline; a rank may hold several stages


class Timeline(Message, frozen=True):
    """The pipeline actions of one rank in one step (sampled)."""

    rank: Rank
    step: Count
    window_ms: Real
    actions: Annotated[list[Action], Meta(max_length=8192)]


class ToPeer(Struct, array_like=True, frozen=True, gc=False):
    """Number of bytes sent to one other rank."""

    peer: Rank
    bytes: Count


class Peers(Message, frozen=True):
    """All-to-all bytes that one rank sent to every other rank in one step (sampled); their sum is `Step.a2a_bytes`."""

    rank: Rank
    step: Count
    sent: Annotated[list[ToPeer], Meta(max_length=8192)]


class Pulse(Message, frozen=True):
    """The agent's thread in a rank sends a pulse once a second. A C call that holds the GIL also stops the pulses."""

    rank: Rank
    step: Count
    doing: Text  # "tp all-gather, layer 2, micro-batch 1"
    since_ms: Real  # time since the operation started
    cpu_percent: Real | None = None


CHECKPOINT_STEP: Final = "checkpoint_step"
"""Fact of an event about a checkpoint on disk: the number of steps completed when it was saved."""

RESUMED: Final = "resumed"
"""Fact of the event that a run resumed from a checkpoint: true."""

MISSING_STEPS: Final = "missing_steps"
"""Fact of the event that ranks have dropped step records before the hub took them: the number of these records. Further
facts are `first_step`, `last_step` and `ranks`, the number of ranks."""

SAMPLE: Final = "sample"
"""Fact of an event whose text the model has generated: true. The fact `step` is the step after which it did."""

RESTART: Final = "restart"
"""Fact of the event that the launcher has started all ranks again and they train: the number of restarts
by this launcher so far; the launcher of a resumed run counts from 1 again. Further facts are `cause`
("relayout" or "failure"), `revision`, `step`, `world`, `lost_s` (seconds without a step) and `lost_steps`."""

ALERT: Final = "alert"
"""Fact of an event that an alert was raised or has ended: the alert's name. Further facts are `subject`, `active`,
`step`, `rank` (the first of `ranks` affected ranks), and the evidence as ``evidence.NAME``."""


class Event(Message, frozen=True):
    """An event for the run's log, such as a saved checkpoint or an error."""

    time_s: Real
    level: Literal["info", "warning", "error"]
    source: Text  # such as "hub" or "rank 3"
    text: Text
    facts: Facts = {}  # machine-readable details, such as CHECKPOINT_STEP


class Bucketed(Struct, array_like=True, frozen=True):
    """Part of a run's curve (`agents.state.metric_curves`): values of one metric, in buckets of `width` steps."""

    metric: Name
    width: Annotated[int, Meta(ge=1, le=2**53)]
    steps: Annotated[list[Count], Meta(max_length=8192)]
    values: Annotated[list[float], Meta(max_length=8192)]


class Recalled(Message, frozen=True):
    """Summaries, events and metric curves that are older than the data in all earlier messages. A restarted hub reads
    them from the run's recording. In a snapshot, `Recalled` holds the part of the metric curves that is older than the
    newest summaries.

    If there are several such messages, each holds older data than the message before. Within a message, the data are in
    chronological order, and `curve` is older than `summaries`.
    """

    summaries: Annotated[list[Summary], Meta(max_length=4096)] = []
    events: Annotated[list[Event], Meta(max_length=4096)] = []
    curve: Annotated[list[Bucketed], Meta(max_length=64)] = []


class Alert(Message, frozen=True):
    """A problem that one of the hub's detectors has found, such as a straggler or a loss spike. The alert is published
    when it is raised, at intervals while it is active, and once more, with `active` false, when it ends.
    """

    name: Name  # name of the condition: "straggler", "loss_spike", ...
    subject: Name  # "rank 3", "layer 2", "run"; name and subject identify the alert
    level: Literal["warning", "error"]
    active: bool
    step: Count  # step of the run when the condition was found
    time_s: Real  # time of this message
    text: Text  # one sentence that states the condition and its evidence
    evidence: Facts = {}  # the numbers on which the alert is based
    ranks: Annotated[list[Rank], Meta(max_length=64)] = []  # the first of the affected ranks
    since_step: Count | None = None  # first step at which the condition was seen
    since_s: Real | None = None  # time when the alert was raised


class Gone(Message, frozen=True):
    """A rank is lost, or has left cleanly (`clean`)."""

    rank: Rank
    clean: bool
    text: Text = ""
    # The hub can check only processes on its own machine. "restarting": the launcher starts all ranks again.
    process: Literal["unknown", "ended", "stopped", "alive", "restarting"] = "unknown"

    @property
    def over(self) -> bool:
        """Whether the rank cannot come back. A stopped or silent process may come back. The hub cannot check whether a
        lost process on another machine has ended, so such a process also counts as one that may come back."""
        return self.clean or self.process == "ended"
