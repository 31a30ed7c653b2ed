"""What is measured beside a step's own record: vital signs, how even experts are loaded; and the wish for more."""

from typing import Annotated, Final

from msgspec import Meta, Struct

from agents.protocol.base import Count, Message, Name, Rank, Real

TOP_EXPERTS: Final = 3
LEASE_S: Final = 60.0  # the longest that full vectors are sent unless somebody asks again

Reasons = Annotated[list[Name], Meta(max_length=16)]


class Vitals(Message, frozen=True):
    """The device of one rank and the machine it runs on, about once a second, from the agent's own thread.

    Whatever the machine does not tell is None: it has no such device, no driver, or keeps that number to itself.
    The `host_` fields come from one rank of a machine where the ranks know which.
    """

    rank: Rank
    step: Count
    device_percent: Real | None = None  # of the last moments, in which a kernel ran
    device_memory_bytes: Count | None = None  # in use on the whole device, by anyone
    device_memory_total: Count | None = None
    power_w: Real | None = None
    power_limit_w: Real | None = None
    temperature_c: Real | None = None
    sm_mhz: Count | None = None
    memory_mhz: Count | None = None
    throttle: Reasons | None = None  # why the clocks are held down; []: they are not
    host_cpu_percent: Real | None = None  # of all cores together, 0..100
    host_memory_bytes: Count | None = None
    host_memory_total: Count | None = None


class ExpertShare(Struct, array_like=True, frozen=True):
    """One expert and its share of its layer's pairs, 0..1."""

    expert: Count
    share: Real


class LoadSummary(Struct, array_like=True, frozen=True):
    """How evenly one layer's router sent its pairs, over the whole job, before any were dropped."""

    layer: Count
    pairs: Count  # (token, expert)
    max_over_mean: Real
    cv: Real  # standard deviation over mean
    entropy: Real  # of the shares over log(experts): 1 is even, 0 is one expert alone
    top: Annotated[list[ExpertShare], Meta(max_length=16)]  # the most loaded, first the most
    idle: Count  # experts that got nothing
    dropped: Count


class Loads(Message, frozen=True):
    """Every layer's load in short, each step (rank 0 sends it); `Experts` has the vectors, now and then."""

    step: Count
    layers: Annotated[list[LoadSummary], Meta(max_length=1024)]


SAMPLES: Final = "samples"
"""The capability (`Hello.capabilities`) of a rank that understands requests for samples."""


class Sample(Message, frozen=True):
    """Asks for full vectors for a while: a client asks the hub, and the hub the ranks.

    The hub chooses `every`, so that all ranks send of the same steps, and no more than it can take.
    """

    kinds: Annotated[list[Name], Meta(max_length=16)]  # experts, timeline, peers
    lease_s: Annotated[float, Meta(ge=0, le=LEASE_S)]
    ranks: Annotated[list[Rank], Meta(max_length=4096)] = []  # of a client; none is all
    every: Annotated[int, Meta(ge=1, le=2**31)] = 1  # steps
