"""Decides when the number of micro-batches per update may change, in loops that count micro-batches modulo that number.

Such loops end an update when the number of completed micro-batches in the epoch is a multiple of the number of
micro-batches per update. So a new value may take effect only when the number of completed micro-batches is a multiple
of the new value, or at the end of the epoch, because the loops then count from zero again.
"""

from typing import Any


class MicroBatches:
    """The number of completed micro-batches in this epoch, as Hugging Face's trainer counts them.

    `length`: micro-batches in an epoch; None if `loader` has no length.
    """

    def __init__(self, loader: Any, state: Any, args: Any) -> None:
        self.length = _length(loader)
        # Without a length, the trainer's epoch has as many micro-batches as all its updates need.
        self._total = self.length or max(1, state.max_steps * args.gradient_accumulation_steps)
        self._state = state
        self._done = 0
        # Micro-batches skipped in the epoch in which the run was resumed.
        self._skipped: int | None = None if state.global_step else 0

    def begin_epoch(self) -> None:
        if self._done:
            self._skipped = 0
        self._done = 0

    def count(self) -> None:
        """Count a micro-batch."""
        self._done += 1

    def end_update(self) -> None:
        """After the first update of a resumed run, compute how many micro-batches of the epoch the trainer skipped."""
        if self._skipped is None:
            self._skipped = (round(self._state.epoch % 1 * self._total) - self._done) % self._total

    def wait(self, accumulation: int) -> str:
        """Why the number of accumulation steps cannot change to `accumulation` before the next update; "" if it can."""
        done = self._done + (self._skipped or 0)
        if done % accumulation == 0 or done == self.length:
            return ""
        return (
            f"{done} micro-batches of this epoch are done; it takes effect after the next update that ends at a "
            f"multiple of {accumulation}, or at the end of the epoch"
        )


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
