"""Decides when a rank sends samples (the loads of all experts, the timeline, bytes by destination rank): every `EVERY`
steps, and more often while a client requests them."""

import time

from agents.protocol import SAMPLES, Sample

EVERY = 20  # interval in steps while there is no request
CAPABILITIES = (SAMPLES,)


class Sampling:
    """Decides at which steps a rank sends each kind of sample, such as the loads of all experts. The trainer's
    thread calls `due` at every step, and the agent's thread calls `take`.

    The interval is in steps, not in seconds, so that all ranks send samples of the same steps.
    """

    def __init__(self) -> None:
        self._leases: dict[str, tuple[int, float]] = {}  # kind -> (interval in steps, end of the lease)
        self._begun: set[str] = set()

    def take(self, sample: Sample) -> None:
        """Apply a client's request to send samples more often; the request expires after `lease_s` seconds."""
        until = time.monotonic() + sample.lease_s
        for kind in sample.kinds:
            self._leases[kind] = (sample.every, until)

    def due(self, kind: str, step: int) -> bool:
        """Whether to send a sample of `kind` for `step`; the first call for each kind always returns True."""
        if kind not in self._begun:
            self._begun.add(kind)
            return True
        every, until = self._leases.get(kind, (EVERY, 0.0))
        return step % EVERY == 0 or (step % every == 0 and time.monotonic() < until)
