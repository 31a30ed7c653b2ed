"""When a rank sends full vectors: every so many steps, and oftener while somebody looks."""

import time

from agents.protocol import SAMPLES, Sample

EVERY = 20  # steps, if nobody asks
CAPABILITIES = (SAMPLES,)


class Sampling:
    """Asked at every step by the trainer's thread, told by the agent's; all ranks that ask alike answer alike.

    By steps and not by a clock, so that what ranks send is of the same steps and fits together.
    """

    def __init__(self) -> None:
        self._sampling_leases: dict[str, tuple[int, float]] = {}  # kind -> every so many steps, until
        self._begun: set[str] = set()

    def take(self, sample: Sample) -> None:
        """Somebody looks, for as long as the lease says."""
        until = time.monotonic() + sample.lease_s
        for kind in sample.kinds:
            self._sampling_leases[kind] = (sample.every, until)

    def due(self, kind: str, step: int) -> bool:
        """Whether the vectors of `step` shall be sent; those of the first step always are."""
        if kind not in self._begun:
            self._begun.add(kind)
            return True
        every, until = self._sampling_leases.get(kind, (EVERY, 0.0))
        return step % EVERY == 0 or (step % every == 0 and time.monotonic() < until)
