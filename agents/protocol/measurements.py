"""Messages with measurements of devices and machines, messages with the expert load, and the message that asks ranks
to send samples."""

from typing import Annotated, Final

from msgspec import Meta, Struct

from agents.protocol.base import Count, Message, Name, Rank, Real

TOP_EXPERTS: Final = 3
LEASE_S: Final = 60.0  # maximum time for which ranks send more samples after one request

Reasons = Annotated[list[Name], Meta(max_length=16)]


class Vitals(Message, frozen=True):
    """Measurements of one rank's device and machine. The agent's own thread sends this message about once a second.

    A field is None if the device or its driver is missing, or does not report the value. If the ranks know which of
    them share a machine, only one rank of each machine sends the `host_` fields.
    """

    rank: Rank
    step: Count
    device_percent: Real | None = None  # share of the device's last sampling period in which a kernel ran
    device_memory_bytes: Count | None = None  # memory in use on the device, by all processes
    device_memory_total: Count | None = None
    power_w: Real | None = None
    power_limit_w: Real | None = None
    temperature_c: Real | None = None
    sm_mhz: Count | None = None
    memory_mhz: Count | None = None
    throttle: Reasons | None = None  # why the clocks are reduced; [] if they are not
    host_cpu_percent: Real | None = None  # utilization of all cores together, 0..100
    host_memory_bytes: Count | None = None
    host_memory_total: Count | None = None


class ExpertShare(Struct, array_like=True, frozen=True):
    """One expert, and the share (0..1) of its layer's token-expert pairs that it receives."""

    expert: Count
    share: Real


class LoadSummary(Struct, array_like=True, frozen=True):
    """Expert load of one layer over the whole job, counted before tokens are dropped."""

    layer: Count
    pairs: Count  # token-expert pairs
    max_over_mean: Real
    cv: Real  # standard deviation over mean
    entropy: Real  # entropy of the shares over log(experts): 1 is even, 0 is a single expert
    top: Annotated[list[ExpertShare], Meta(max_length=16)]  # the most loaded experts, in descending order
    idle: Count  # experts without a token
    dropped: Count


class Loads(Message, frozen=True):
    """A summary of the expert load of every MoE layer, sent by rank 0 at each step. The load of each single expert is
    in `Experts`, which is sent less often.
    """

    step: Count
    layers: Annotated[list[LoadSummary], Meta(max_length=1024)]


SAMPLES: Final = "samples"
"""The capability (`Hello.capabilities`) of a rank that understands requests for samples."""


class Sample(Message, frozen=True):
    """Requests that ranks send samples more often for a limited time: the load of each expert, pipeline timelines, or
    all-to-all bytes by destination. Clients send this message to the hub; the hub sends its own `Sample` to the ranks.

    The hub chooses `every` so that all ranks send samples of the same steps, at a rate that the hub can handle.
    """

    kinds: Annotated[list[Name], Meta(max_length=16)]  # experts, timeline, peers
    lease_s: Annotated[float, Meta(ge=0, le=LEASE_S)]
    ranks: Annotated[list[Rank], Meta(max_length=4096)] = []  # requested by a client; empty: all
    every: Annotated[int, Meta(ge=1, le=2**31)] = 1  # steps
