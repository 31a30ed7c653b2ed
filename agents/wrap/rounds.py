"""The ranks of a wrapped program exchange data in rounds, one every few steps. In a round, each rank sends rank 0 a
report of its steps and its vote on the pending knob change, and rank 0 returns a decision: the votes of all ranks, the
next change to vote on, and the step of the round after next. A change takes effect on all ranks after the same step, or
on no rank.

All ranks take part in a round after the same step, and by then have the decision of the previous round. The ranks
therefore agree on the step of the next round, on the steps to report, and on the change to apply. A separate thread
waits for the reports and the decision while training continues. If the decision of a round has not arrived when
training reaches the step of the next round, training waits for it up to `LATE_S` seconds; if it is still missing then,
there are no further rounds.
"""

import math
import queue
import threading
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from agents.protocol import Command, Traffic
from agents.rank.vote import LEADER
from agents.wrap.exchange import ClosedError, StoreRanks

ROUND_S = 0.25  # minimum time between rounds; longer with many ranks, because rank 0 reads all reports
ROUND_S_PER_RANK = 0.002
RECORD_S = 0.05  # minimum time between reported steps
FIRST_GAP = 2  # steps between the first rounds
START_S = 1.0  # time from choosing the first round to that round, so that all ranks know it in time
LATE_S = 2.0  # how long training waits, once, for a missing decision
MOST_RECORDS = 64
MOST_GAP = 512  # maximum number of steps between rounds, because steps may become slower
MOST_STRIDE = 64


class Record(Struct, array_like=True, frozen=True):
    """What a rank reports about one of its steps."""

    step: int
    step_ms: float
    loss: float | None
    tokens: int | None
    comm: dict[str, Traffic]
    lr: float | None
    batch: list[int] | None = None  # equal on ranks that train on the same tokens; None: no other rank does


class Report(Struct, array_like=True, frozen=True):
    """What a rank sends rank 0 in a round: its steps since the last round, and its vote on the pending knob change."""

    step: int
    step_s: float  # mean time of a step since the last round
    records: list[Record]
    command: Command | None = None  # from rank 0: a change to vote on
    vote: str | None = None  # on the command of the last decision; "": agrees; None: no command


class Decision(Struct, array_like=True, frozen=True):
    """What rank 0 announces to all ranks after it has read their reports of a round."""

    gap: int  # steps from the next round to the one after it
    stride: int  # ranks report the steps whose number is a multiple of it
    command: Command | None = None  # to vote on in the next round
    votes: list[str] = []  # of all ranks, on the command of the last decision


def decide(reports: Sequence[Report]) -> Decision:
    """Rank 0's decision of a round, made from the reports of all ranks, which are given in rank order."""
    step_s = max(reports[LEADER].step_s, 1e-6)
    stride = min(max(1, math.ceil(RECORD_S / step_s)), MOST_STRIDE)
    round_s = ROUND_S + ROUND_S_PER_RANK * len(reports)
    gap = stride * max(1, math.ceil(round_s / (stride * step_s)))
    votes = [report.vote for report in reports]
    counted = [] if None in votes else [vote or "" for vote in votes]
    return Decision(min(max(gap, FIRST_GAP), MOST_GAP), stride, reports[LEADER].command, counted)


Outcome = tuple[Decision, list[Report]]
"""A decision and, on rank 0, the reports of all ranks."""


class Rounds:
    """One rank's part in the rounds (see the module), and the thread that waits for the reports of the other ranks and
    for rank 0's decision. `failure`: why there are no more rounds.

    `start`: the step after which the first round takes place; None while it is unknown. `position` returns the number
    of the last step and the mean step time (None while it is unknown).
    """

    def __init__(self, ranks: StoreRanks, position: Callable[[], tuple[int, float | None]]) -> None:
        self._ranks, self._position = ranks, position
        self._closed = threading.Event()
        self.start: int | None = None
        self._reports: queue.SimpleQueue[tuple[int, Report] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Outcome | None] = queue.SimpleQueue()
        self.failure = ""
        self._thread = threading.Thread(target=self._work, name="cockpit-rounds", daemon=True)
        self._thread.start()

    def submit(self, number: int, report: Report) -> None:
        """Queue this rank's report for round `number`; the thread sends it to rank 0. Returns at once."""
        self._reports.put((number, report))

    def outcome(self) -> Outcome | None:
        """Return rank 0's decision of the round whose report was submitted last (on rank 0, also the reports of all
        ranks). Waits for it up to `LATE_S` seconds; returns None if it is still missing then, and `failure` gives the
        reason.
        """
        try:
            outcome = self._outcomes.get(timeout=LATE_S)
        except queue.Empty:
            outcome = None
        if outcome is None and not self.failure:
            self.failure = "the ranks do not step together"
        return outcome

    def close(self) -> None:
        """End the thread. The caller must first set the `closing` event, which ends all waits of `StoreRanks`."""
        self._closed.set()
        self._reports.put(None)
        self._thread.join(LATE_S)

    def _work(self) -> None:
        try:
            self.start = self._agree_on_start()
            while (submitted := self._reports.get()) is not None:
                self._outcomes.put(self._round(*submitted))
        except ClosedError:
            self._outcomes.put(None)
        except Exception as error:  # noqa: BLE001 - the store of the program is gone, or has foreign bytes
            self.failure = self.failure or f"the exchange between ranks failed: {error}"
            self._outcomes.put(None)

    def _agree_on_start(self) -> int:
        """Return the step after which all ranks take part in the first round. When all ranks have joined, perhaps after
        different steps, rank 0 chooses a step about `START_S` seconds ahead of its own, so that all ranks know the step
        before they reach it.
        """
        ranks = self._ranks
        ranks.put(f"joined/{ranks.rank}", b"")
        if ranks.rank != LEADER:
            return int(ranks.wait(["start"])[0])
        ranks.wait([f"joined/{rank}" for rank in range(ranks.world)])
        while True:
            step, step_s = self._position()
            if step_s is not None:
                start = step + max(2 * FIRST_GAP, math.ceil(START_S / max(step_s, 1e-6)))
                ranks.put("start", str(start).encode())
                return start
            if self._closed.wait(0.05):
                raise ClosedError

    def _round(self, number: int, report: Report) -> Outcome:
        ranks, encode = self._ranks, msgspec.msgpack.encode
        ranks.put(f"{number}/{ranks.rank}", encode(report))
        if number:  # every rank has the decision of the previous round, so no rank reads that report again
            ranks.remove(f"{number - 1}/{ranks.rank}")
        if ranks.rank != LEADER:
            (packed,) = ranks.wait([f"{number}/decision"])
            return msgspec.msgpack.decode(packed, type=Decision), []
        gathered = ranks.wait([f"{number}/{rank}" for rank in range(ranks.world)])
        reports = [msgspec.msgpack.decode(one, type=Report) for one in gathered]
        decision = decide(reports)
        ranks.put(f"{number}/decision", encode(decision))
        if number > 1:
            ranks.remove(f"{number - 2}/decision")
        return decision, reports
