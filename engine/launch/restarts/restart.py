"""Data about a restart of the ranks: its cause, the time and the steps lost by it, and the report of rank 0 to its
parent."""

import mmap
import struct
import time
from dataclasses import dataclass, field
from typing import Literal

from agents.protocol import RESTART, Facts, Step
from engine.config.relayout import MOST_CHARACTERS

Cause = Literal["relayout", "failure"]


class Handover:
    """Memory shared by rank 0, its parent and the ranks started after a restart. This memory holds the time when rank 0
    first began to train, the time when its newest step ended, whether the last checkpoint could not be saved, and the
    text of the layout with which the run continues.

    The times are those of `time.monotonic`, which all processes of a machine share and no clock change moves.
    """

    _FORM = struct.Struct(f"<dd?q{4 * MOST_CHARACTERS}s")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self._FORM.size)
        self._write(0.0, 0.0, "")

    def _write(self, began_s: float, ended_s: float, text: str, unsaved: bool = False) -> None:
        raw = text.encode()
        self._FORM.pack_into(self._memory, 0, began_s, ended_s, unsaved, len(raw), raw)

    def begin(self, now: float) -> None:
        """Record that rank 0 begins to train at `now`; only the first call has an effect."""
        if self.began_s is None:
            self._write(now, 0.0, "")

    def step_done(self, now: float) -> None:
        """Record that a step has ended at `now`."""
        self._write(self.began_s or 0.0, now, "")

    def leave(self, text: str) -> None:
        """Record that the ranks exit to change the layout: they have saved a checkpoint, and the run continues with the
        layout that `text` describes.
        """
        self._write(self.began_s or 0.0, self.ended_s or 0.0, text)

    def lose(self) -> None:
        """Record that the run's last checkpoint could not be saved."""
        self._write(self.began_s or 0.0, self.ended_s or 0.0, "", unsaved=True)

    @property
    def began_s(self) -> float | None:
        """The time when rank 0 first began to train; None before that."""
        return self._FORM.unpack_from(self._memory)[0] or None

    @property
    def unsaved(self) -> bool:
        """Whether the run's last checkpoint could not be saved."""
        return bool(self._FORM.unpack_from(self._memory)[2])

    @property
    def ended_s(self) -> float | None:
        """The time when the newest step ended; None before the first step."""
        return self._FORM.unpack_from(self._memory)[1] or None

    @property
    def text(self) -> str | None:
        """The text of the new layout; None unless the ranks have exited to change the layout."""
        *_, size, raw = self._FORM.unpack_from(self._memory)
        return raw[:size].decode() if size else None


@dataclass(frozen=True)
class Restarted:
    """Rank 0's report that training has resumed after a restart. `lost_s`: seconds from the end of the last step before
    the restart to the start of the first step after it; None if there was no earlier step. `lost_steps`: number of
    steps since the checkpoint; these steps are trained again.
    """

    number: int
    cause: Cause
    why: str
    step: int
    world: int
    revision: int
    lost_s: float | None
    lost_steps: int

    def __str__(self) -> str:
        seconds = "no step was trained before" if self.lost_s is None else f"{self.lost_s:.1f} s"
        return (
            f"{self.why}: {self.world} ranks train again from step {self.step}; lost {seconds} and "
            f"{self.lost_steps} step{'s' * (self.lost_steps != 1)}"
        )

    @property
    def facts(self) -> Facts:
        return {
            RESTART: self.number,
            "cause": self.cause,
            "revision": self.revision,
            "step": self.step,
            "world": self.world,
            "lost_s": self.lost_s,
            "lost_steps": self.lost_steps,
        }


@dataclass(frozen=True)
class Restart:
    """One start of the ranks by a launcher that can restart them. `number` is 0 for the first start."""

    handover: Handover = field(repr=False)
    number: int = 0
    cause: Cause = "relayout"
    why: str = ""
    lost_steps: int = 0

    def begin(self, leads: bool) -> float:
        """Called when a rank begins to train. Returns the seconds since the first start of the ranks; 0 at the first
        start."""
        now = time.monotonic()
        if leads:
            self.handover.begin(now)
        first_s = self.handover.began_s
        return now - first_s if self.number and first_s else 0.0

    def at_first_step(self, step: Step, world: int, began_s: float) -> Restarted:
        """The report about this restart, made after the first step that follows the restart. `began_s`: when that first
        step started, by `time.monotonic`."""
        ended_s = self.handover.ended_s
        lost_s = None if ended_s is None else round(max(0.0, began_s - ended_s), 3)
        return Restarted(
            self.number, self.cause, self.why, step.step, world, step.revision, lost_s, self.lost_steps
        )
