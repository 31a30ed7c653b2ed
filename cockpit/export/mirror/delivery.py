"""Passes the steps of a mirror to the writer of another program, in a separate thread.

A program may be slow, or absent for a while. The connection to the hub goes on meanwhile: the steps wait in a queue,
and the thread tries again until the run has ended.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from cockpit.export.curves import CurveWriter, Point

BATCH = (
    16  # steps in one write, so that a write is one request of MLflow, which is accepted whole or not at all
)
MOST_STEPS = 100_000  # steps that wait for a program; the oldest are then dropped
RETRY_S = (1.0, 30.0)  # pause before the first retry, and the longest
END_S = 15.0  # how long the end of the run waits for steps that the program has not accepted yet


class Refusal(Exception):
    """The program did not accept the steps. `lasting`: it would not accept them later either, for example because the
    address is wrong."""

    def __init__(self, why: str, lasting: bool = False) -> None:
        super().__init__(why)
        self.lasting = lasting


def lasting_status(status: int) -> bool:
    """Whether an HTTP status means that a request would not be accepted later either."""
    return 400 <= status < 500 and status not in (408, 429)


class Delivery:
    """Writes steps with `writer`, in order. `errors`: the exceptions with which the writer reports that the program
    does not accept the steps. `report` is called with the reason when an outage begins and, after its end, with None;
    its second argument is the duration of the outage so far, in seconds.

    A lasting refusal ends the delivery only before the first step has been accepted; later, it is an outage too.
    """

    def __init__(
        self,
        writer: CurveWriter,
        errors: tuple[type[Exception], ...],
        report: Callable[[Refusal | None, float], None],
    ) -> None:
        self.written = 0  # steps that the program has accepted
        self.dropped = 0  # steps that were dropped because the queue was full
        self.failure: Exception | None = None  # why the delivery has ended although there are more steps
        self.outage = False  # whether the program does not accept steps at the moment
        self._writer, self._errors, self._report = writer, errors, report
        self._waiting: deque[Point] = deque()
        self._batch: list[Point] = []  # the steps that are being written
        self._changed = threading.Condition()
        self._deadline: float | None = None  # once the run has ended
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    @property
    def unsent(self) -> int:
        """Steps that the program has not accepted yet."""
        return len(self._batch) + len(self._waiting)

    def put(self, points: Sequence[Point]) -> None:
        """Queue steps; returns at once."""
        if not points:
            return
        with self._changed:
            self._waiting.extend(points)
            while len(self._waiting) > MOST_STEPS:
                self._waiting.popleft()
                self.dropped += 1
            self._changed.notify()

    def close(self) -> None:
        """Wait at most `END_S` until all steps are written, and end the thread."""
        with self._changed:
            self._deadline = time.monotonic() + END_S
            self._changed.notify()
        self._thread.join(2 * END_S)  # an attempt that has begun may take longer

    def _work(self) -> None:
        try:
            while self._take():
                self._deliver()
            self._writer.close()
        except Exception as error:  # noqa: BLE001 - handled in the main thread
            self.failure = error

    def _take(self) -> bool:
        """Wait for steps, and move them to `_batch`. Returns False if the run has ended and there are none."""
        with self._changed:
            while not self._waiting and self._deadline is None:
                self._changed.wait()
            self._batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
        return bool(self._batch)

    def _deliver(self) -> None:
        """Write the batch; repeat this while the program refuses it."""
        pause, began = RETRY_S[0], time.monotonic()
        while (refusal := self._refusal()) is not None:
            if refusal.lasting and not self.written:
                raise refusal
            if not self.outage:
                self.outage = True
                self._report(refusal, 0.0)
            with self._changed:
                if self._deadline is None:
                    self._changed.wait_for(lambda: self._deadline is not None, pause)
                elif time.monotonic() + RETRY_S[0] > self._deadline:
                    raise refusal
                else:
                    time.sleep(RETRY_S[0])
            pause = min(2 * pause, RETRY_S[1])
        self.written += len(self._batch)
        self._batch = []
        if self.outage:
            self.outage = False
            self._report(None, time.monotonic() - began)

    def _refusal(self) -> Refusal | None:
        """Write the batch once. Returns why the program refuses it; None if it is written."""
        try:
            self._writer.write(self._batch)
        except Refusal as refusal:
            return refusal
        except self._errors as error:
            status = getattr(error, "get_http_status_code", lambda: 500)()  # of MLflow
            return Refusal(str(error), lasting_status(status))
        return None
