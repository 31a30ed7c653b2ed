"""Seconds of a collective: alpha-beta-gamma costs of the common algorithms, in groups inside one node and in groups
that span several nodes.

An algorithm over P ranks and a buffer of n bytes takes steps x alpha + sent x n x beta + reduced x n x gamma seconds.
Here alpha is the latency of a message, 1/beta the bandwidth of a link, and gamma the time to reduce a byte
(`engine.planner.timing.costs`).

A group may span N domains of the inner links (nodes) with r ranks each, and every rank has its own link to the outer
network. A ring of all P = r N ranks sends n (P-1)/P bytes over each of its links, including those between domains; r
such rings with n/r bytes each use all outer links (NCCL, src/graph/rings.cc). The ring is pipelined, so its transfer
time is the time on the links inside the nodes or the time on the links between them, whichever is longer. The
hierarchical algorithm has one phase inside the domains and one between them, in either order. The hierarchical
algorithm has fewer sequential steps than a ring, and sends only n/r (N-1)/N bytes over an outer link, but its phases do
not overlap.
"""

from functools import lru_cache
from math import ceil

from engine.planner.hardware.description import Hardware, Link
from engine.planner.timing.costs import ALGORITHMS, cost, share_of_others
from engine.planner.timing.measured import measured_time


def level_time(kind: str, size: float, ranks: int, link: Link, share: float, gamma: float) -> float:
    """Seconds of a collective whose ranks are all connected by `link`, with the fastest algorithm."""
    return _level_time(kind, size, ranks, link.latency, 1 / (link.bandwidth * share), gamma)[0]


@lru_cache(maxsize=65_536)
def _level_time(
    kind: str, size: float, ranks: int, alpha: float, beta: float, gamma: float
) -> tuple[float, str]:
    return min(
        (c.steps * alpha + size * (c.sent * beta + c.reduced * gamma), name)
        for name, algorithm in ALGORITHMS[kind].items()
        for c in [algorithm(ranks)]
    )


def domains(ranks: int, stride: int, hardware: Hardware) -> tuple[int, int]:
    """The number of ranks of a group that share a domain, such as a node, and the number of domains that the group
    spans. Consecutive ranks of the group are `stride` apart."""
    inner = hardware.links[0].ranks
    if inner is None or len(hardware.links) == 1:
        return ranks, 1
    together = max(1, min(ranks, inner // stride))
    return together, ceil(ranks / together)


def share_inside(axis: str, together: int, ranks: int) -> float:
    """Of the bytes sent over an axis, the share that stays inside a domain, such as a node. A group has `ranks` ranks,
    `together` of them in each domain. For a group inside one domain, the share is 1."""
    if axis == "ep":
        return (together - 1) / (ranks - 1)
    return (1 - 1 / together) / (1 - 1 / ranks)


def sent_by_level(
    kind: str, size: float, copies: int, ranks: int, stride: int, hardware: Hardware
) -> tuple[tuple[float, float], tuple[float, float]]:
    """For the links inside a domain, and for the links between domains: the number of bytes and the number of
    consecutive messages that a rank sends in a collective. Over N domains of r ranks, a rank sends n (r-1)/r bytes of
    an n-byte buffer inside its domain and n/r (N-1)/N to other domains (the hierarchical algorithm); in an all-reduce,
    it sends twice these amounts. In an all-to-all, a rank sends each byte once; with `copies` > 1 (see
    `dispatch_time`), a rank sends a token at most once to each other domain."""
    together, spanned = domains(ranks, stride, hardware)
    passes = 2 if kind == "all_reduce" else 1
    if ranks == 1 or size <= 0:
        return (0.0, 0.0), (0.0, 0.0)
    if kind == "send":
        alone = (size, 1.0)
    else:
        alone = (passes * size * share_of_others(ranks), passes * (ranks - 1.0))
    if spanned == 1:
        return alone, (0.0, 0.0)
    if together == 1 and copies == 1:
        return (0.0, 0.0), alone
    within, between = size * share_of_others(together), size / together * share_of_others(spanned)
    if kind == "all_to_all":
        within, between = size * (together - 1) / ranks, size * (ranks - together) / ranks
        if copies > 1:
            within, between = size * share_of_others(together), size / copies * _reached(copies, spanned)
    return (passes * within, passes * (together - 1.0)), (passes * between, passes * (spanned - 1.0))


def _reached(copies: int, spanned: int) -> float:
    """Mean number of other domains that receive a token if each of its `copies` copies goes to a random one of
    `spanned` domains."""
    return spanned * (1 - (1 - 1 / spanned) ** copies) * share_of_others(spanned)


def collective_time(kind: str, size: float, ranks: int, stride: int, hardware: Hardware) -> float:
    """Seconds of a collective over `ranks` ranks that are `stride` apart, with the fastest algorithm."""
    return choose(kind, size, ranks, stride, hardware)[0]


def choose(kind: str, size: float, ranks: int, stride: int, hardware: Hardware) -> tuple[float, str]:
    """Seconds of a collective with the fastest algorithm, and the name of that algorithm."""
    if ranks == 1 or size <= 0:
        return 0.0, "none"
    if hardware.measured and (found := measured_time(kind, size, ranks, stride, hardware)):
        return found
    together, spanned = domains(ranks, stride, hardware)
    share = hardware.efficiency.link
    inner, outer = hardware.links[0], hardware.links[-1]
    gamma = 3 / hardware.device.memory_bandwidth  # adding a byte takes two reads and one write
    fast, slow = 1 / (inner.bandwidth * share), 1 / (outer.bandwidth * share)
    if spanned == 1:
        return _level_time(kind, size, ranks, inner.latency, fast, gamma)
    if together == 1:
        return _level_time(kind, size, spanned, outer.latency, slow, gamma)
    if kind == "all_to_all":
        return _two_level_all_to_all(size, together, spanned, inner.latency, outer.latency, fast, slow)
    if kind == "send":
        return outer.latency + size * slow, "direct"
    ring = cost(kind, "ring", ranks)
    passes = 2 if kind == "all_reduce" else 1
    between, inside = ring.sent * size / together * slow, ring.sent * size * fast
    reduced = ring.reduced * size * gamma
    flat = (spanned - 1) * passes * outer.latency + (ranks - spanned) * passes * inner.latency
    levels = (
        _level_time(kind, size / together, spanned, outer.latency, slow, gamma)[0]
        + _level_time(kind, size, together, inner.latency, fast, gamma)[0]
    )
    return min((flat + max(between, inside) + reduced, "ring"), (levels, "hierarchical"))


def _two_level_all_to_all(
    size: float, together: int, spanned: int, alpha_in: float, alpha_out: float, fast: float, slow: float
) -> tuple[float, str]:
    """The time in seconds and the name of the faster of two all-to-all algorithms. In the direct algorithm, each rank
    sends one message to every other rank. In the hierarchical algorithm, a rank sends all data for another domain to
    the rank with the same index in that domain, which distributes them there."""
    ranks = together * spanned
    outside, inside = size * (ranks - together) / ranks, size * (together - 1) / ranks
    direct = (ranks - 1) * alpha_in + max(outside * slow, inside * fast) + alpha_out
    levels = (spanned - 1) * alpha_out + outside * slow + (together - 1) * alpha_in
    levels += size * share_of_others(together) * fast
    return min((direct, "direct"), (levels, "hierarchical"))


def dispatch_time(size: float, copies: int, ranks: int, stride: int, hardware: Hardware) -> float:
    """Seconds of an all-to-all that sends each token to `copies` random ranks. The token is sent to any other domain at
    most once and copied inside that domain (DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.2). On average, a token has
    experts in N (1 - (1 - 1/N)^copies) of N domains."""
    together, spanned = domains(ranks, stride, hardware)
    if spanned == 1:
        return collective_time("all_to_all", size, ranks, stride, hardware)
    share = hardware.efficiency.link
    inner, outer = hardware.links[0], hardware.links[-1]
    between = size / copies * _reached(copies, spanned) / (outer.bandwidth * share)
    inside = size * share_of_others(together) / (inner.bandwidth * share)
    return max(between, inside) + (spanned - 1) * outer.latency + (together - 1) * inner.latency
