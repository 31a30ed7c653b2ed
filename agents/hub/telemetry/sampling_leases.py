"""Sampling leases: clients request samples (the load of each expert, pipeline timelines, all-to-all bytes by
destination), and the hub decides how often each rank sends them.

A lease is a request for certain kinds of samples from certain ranks, with an expiry time. A client holds at most one
lease, and renews it while it shows these samples. A rank from which no lease requests samples sends them at its own
sampling period. The total sampling rate is bounded, regardless of the number of clients.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from agents.protocol import Sample

KINDS = ("experts", "timeline", "peers")
SAMPLE_PERIOD_S = 0.5  # minimum interval between two samples of one rank and kind
MESSAGES_PER_S = 512.0  # maximum rate of samples of one kind, from all ranks together
CLIENTS = 256
REQUEST_S = 10.0  # how long a rank keeps sampling after one request
RENEW_S = 4.0
RANKS_PER_TURN = 1024  # maximum number of ranks that get a request in one tick; the others get it in the next


@dataclass
class _Lease:
    kinds: frozenset[str]
    ranks: frozenset[int]  # an empty set means all ranks
    until: float


@dataclass(frozen=True)
class _Requested:
    wanted: tuple[tuple[str, int], ...]  # kinds and the interval in steps
    identity: bytes
    at_s: float


class SamplingLeases:
    """All leases of one hub. The caller passes all times, in seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._sampling_leases: dict[bytes, _Lease] = {}
        self._requested: dict[int, _Requested] = {}

    def ask(self, client: bytes, sample: Sample, now: float) -> str | None:
        """Set or replace a client's lease; returns a refusal if too many clients hold one."""
        self._expire(now)
        # A newer client may request kinds that this hub does not know.
        kinds = frozenset(sample.kinds).intersection(KINDS)
        if not kinds or sample.lease_s <= 0:
            self._sampling_leases.pop(client, None)
        elif client not in self._sampling_leases and len(self._sampling_leases) >= CLIENTS:
            return f"{CLIENTS} clients already request samples, the most that this hub serves"
        else:
            self._sampling_leases[client] = _Lease(kinds, frozenset(sample.ranks), now + sample.lease_s)
        return None

    def requests_due(
        self, ranks: Mapping[int, bytes], step_ms: float | None, now: float
    ) -> Iterator[tuple[bytes, list[Sample]]]:
        """The requests for samples to send to ranks now, by connection: new and changed ones, and those sent at least
        `RENEW_S` seconds ago. `ranks`: the ranks that support sampling, with their connections. All ranks behind one
        relay get a single message, so that the messages do not fill the socket's send queue; ZeroMQ drops messages when
        this queue is full.
        """
        self._expire(now)
        if not self._sampling_leases or step_ms is None:
            return
        every = {kind: self._every(kind, len(ranks), step_ms) for kind in KINDS}
        requested_ranks = {kind: self._requested_ranks(kind) for kind in KINDS}
        remaining = RANKS_PER_TURN
        due: dict[tuple[bytes, tuple[tuple[str, int], ...]], list[int]] = {}
        for rank, identity in ranks.items():
            wanted = tuple(
                (kind, every[kind])
                for kind, those in requested_ranks.items()
                if those is None or rank in those
            )
            requested = self._requested.get(rank)
            known = requested is not None and (requested.wanted, requested.identity) == (wanted, identity)
            if not wanted or (requested and known and now - requested.at_s < RENEW_S):
                continue
            self._requested[rank] = _Requested(wanted, identity, now)
            due.setdefault((identity, wanted), []).append(rank)
            remaining -= 1
            if not remaining:
                break
        for (identity, wanted), those in due.items():
            yield identity, [Sample([kind], REQUEST_S, those, steps) for kind, steps in wanted]

    def _requested_ranks(self, kind: str) -> frozenset[int] | None:
        """The ranks whose records of this kind clients have requested; None if a client has requested those of all
        ranks."""
        those = [lease.ranks for lease in self._sampling_leases.values() if kind in lease.kinds]
        return frozenset().union(*those) if all(those) else None

    def _every(self, kind: str, world: int, step_ms: float) -> int:
        """Number of steps between two samples: a power of two, so that a small change of the step time rarely affects
        the number.
        """
        requested_ranks = [
            len(lease.ranks) or world for lease in self._sampling_leases.values() if kind in lease.kinds
        ]
        ranks = min(world, sum(requested_ranks))
        pause_s = max(SAMPLE_PERIOD_S, ranks / MESSAGES_PER_S)
        return 1 << max(0, min(20, math.ceil(math.log2(max(1e-3, 1000 * pause_s / max(step_ms, 1e-3))))))

    def _expire(self, now: float) -> None:
        for client in [client for client, lease in self._sampling_leases.items() if lease.until <= now]:
            del self._sampling_leases[client]
