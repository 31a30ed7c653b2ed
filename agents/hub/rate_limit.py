"""Rate limit: a maximum number of events per second for each source."""

from collections import Counter


class RateLimit:
    """Counts, in each whole second, the events that each source (such as a rank) has caused.

    At most `sources` sources are counted (None: any number), so that memory use is bounded even if a peer invents
    sources. Once this many sources are counted, events from any other source are refused until the next second.
    """

    def __init__(self, per_second: int, sources: int | None = None) -> None:
        self._per_second = per_second
        self._sources = sources
        self._second = -1
        self._counts: Counter[object] = Counter()

    def allows(self, source: object, now: float) -> bool:
        """Whether one more event of `source` is within the limit. `now`: the time of a monotonic clock in seconds."""
        if int(now) != self._second:
            self._second = int(now)
            self._counts.clear()
        if self._sources is not None and len(self._counts) >= self._sources and source not in self._counts:
            return False
        self._counts[source] += 1
        return self._counts[source] <= self._per_second
