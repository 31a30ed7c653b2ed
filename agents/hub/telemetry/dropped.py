"""Reports steps that ranks have dropped because the hub did not take their records in time, for example while the hub
was suspended. An agent numbers its step records (`Step.seq`), so a gap in these numbers is exactly what is missing.
"""

import time
from dataclasses import dataclass

from agents.protocol import MISSING_STEPS, Event, Hello, Step


@dataclass
class _Sender:
    """The newest step record of a rank: the process that sent it, its number, and its step."""

    process: tuple[str, int, int]
    seq: int
    step: int
    lost: int  # number of records of all kinds that the rank has dropped


class DroppedSteps:
    """Collects the gaps until no further gap appears, so that one outage is one event. `idle_s`: the longest time for
    which the hub has not run since the last event. `first_hub`: no earlier hub process has served the run, so that
    everything that a rank has dropped before its first record is missing.
    """

    def __init__(self, first_hub: bool = False) -> None:
        self.idle_s = 0.0
        self._first_hub = first_hub
        self._senders: dict[int, _Sender] = {}
        self._ranks: set[int] = set()
        self._steps: list[int] = []  # first and last steps of the gaps
        self._count = 0
        self._grown = False  # whether a gap was found since the last call of `take`

    def note(self, sender: Hello, step: Step, all_noted: bool) -> None:
        """Compare the number of a step record with that of the record before. `all_noted`: whether this method gets
        every record; if not, a gap counts only as far as the rank says that it has dropped records.
        """
        before = self._senders.get(step.rank)
        if before is None and self._first_hub and step.lost_records:
            before = _Sender(sender.process, 0, max(sender.first_step, step.step - step.seq + 1) - 1, 0)
        missing = step.seq - before.seq - 1 if before else 0
        if before and not all_noted:
            missing = min(missing, step.lost_records - before.lost)
        if before and before.process == sender.process and missing > 0:
            self._count += missing
            self._ranks.add(step.rank)
            self._steps += [before.step + 1, max(before.step + 1, step.step - 1)]
            self._grown = True
        self._senders[step.rank] = _Sender(sender.process, step.seq, step.step, step.lost_records)

    def take(self, limit_s: float) -> Event | None:
        """One event for all gaps, as soon as a call finds no new one. `limit_s`: how long the hub may not run without
        being called suspended."""
        grown, self._grown = self._grown, False
        if grown or not self._count:
            return None
        first, last, ranks = min(self._steps), max(self._steps), len(self._ranks)
        who = f"rank {next(iter(self._ranks))}" if ranks == 1 else f"{ranks} ranks"
        idle = f" (it did not run for {self.idle_s:.0f} s)" if self.idle_s >= limit_s else ""
        text = (
            f"records of the steps {first} to {last} are missing: {who} dropped {self._count} of them, because the hub "
            f"did not take them in time{idle}"
        )
        facts = {MISSING_STEPS: self._count, "first_step": first, "last_step": last, "ranks": ranks}
        self._ranks, self._steps, self._count, self.idle_s = set(), [], 0, 0.0
        return Event(time.time(), "warning", "hub", text, dict(facts))
