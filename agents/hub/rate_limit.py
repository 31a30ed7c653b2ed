"""How often somebody may do something: so many times a second."""

from collections import Counter


class RateLimit:
    """Counts by the whole second. What is counted under must be bounded by other means, such as connections."""

    def __init__(self, a_second: int) -> None:
        self._a_second = a_second
        self._second = -1
        self._counted: Counter[object] = Counter()

    def allows(self, who: object, now: float) -> bool:
        """Whether this one may do it once more; `now` in seconds of any clock that does not go back."""
        if int(now) != self._second:
            self._second = int(now)
            self._counted.clear()
        self._counted[who] += 1
        return self._counted[who] <= self._a_second
