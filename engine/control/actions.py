"""What an operator asks of the run as a whole: hold still, go on, stop, trace some steps. Actions on the knob board."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agents.protocol import Legal
from agents.rank.knob_board import Knob, Values

PROFILED_STEPS = (1, 2, 3, 5, 10, 20, 50)  # a trace of a step of a small model is some megabytes


class RunActions:
    """One rank's side. Wishes come in at a step boundary, on all ranks alike; the trainer carries them out."""

    def __init__(self) -> None:
        self.paused = False
        self.stopping = False

    def knobs(self) -> list[Knob]:
        def pause(_: object) -> None:
            self.paused = True

        def resume(_: object) -> None:
            self.paused = False

        def stop(_: object) -> None:
            self.stopping = True

        return [
            action("pause", "hold still when the step ends; commands are still heard, resume goes on", pause),
            action("resume", "go on after a pause", resume),
            action(
                "stop", "end the run when the step ends, with a last checkpoint if it keeps any", stop, True
            ),
        ]


@dataclass(frozen=True)
class Wanted:
    """Steps to trace, and the rank that does; None: each of them."""

    steps: int
    rank: int | None = 0


@dataclass(frozen=True)
class Traced:
    """What became of a trace on this rank."""

    path: Path
    first: int
    last: int
    why: str = ""  # it failed, and this is the cause

    def __str__(self) -> str:
        steps = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        if self.why:
            return f"the trace of {steps} was not written: {self.why}; training goes on"
        return f"trace of {steps}: {self.path}"


class Profiler:
    """Traces of this rank's steps, in `folder`, as torch.profiler's Kineto writes them (chrome://tracing, Perfetto).

    No code of the profiler runs outside the steps that were asked for. Writing a trace is left to a thread.

    A trace must neither begin nor end with a collective under way. Gloo's own thread writes the time at which a
    collective ended into the profiler's event of it, and `stop` has freed the events by then (torch 2.13: SIGSEGV in
    `onFunctionExit` below `Work::finish`, or silently spoilt memory).
    """

    def __init__(self, folder: Path, rank: int, world: int, device: torch.device) -> None:
        self._folder, self._rank, self._world = folder, rank, world
        activity = torch.profiler.ProfilerActivity
        self._activities = [activity.CPU] + [activity.CUDA] * (device.type == "cuda")
        self._wanted: Wanted | None = None
        self._profile: torch.profiler.profile | None = None
        self._first, self._left = 0, 0
        self._thread: threading.Thread | None = None
        self._finished: deque[Traced] = deque()

    def knobs(self) -> list[Knob]:
        ranks = Legal(choices=["all"], low=0, high=self._world - 1)
        return [
            Knob(
                "profile",
                lambda _: Legal(choices=list(PROFILED_STEPS)),
                True,
                "trace so many steps with torch.profiler, of rank 0 or profile_rank, into the run's folder",
                self.request,
                self._prepare,
                action=True,
            ),
            Knob(
                "profile_rank",
                lambda _: ranks,
                True,
                "whose steps profile traces, asked together with it; all = a trace of each rank",
                lambda _: None,
                self._prepare,
                action=True,
            ),
        ]

    def _prepare(self, values: Values) -> Wanted:
        steps, rank = values.get("profile"), values.get("profile_rank", 0)
        if not isinstance(steps, int):
            raise ValueError(
                "profile_rank says whose steps profile traces; set both: profile=5 profile_rank=0"
            )
        if isinstance(rank, float):
            raise ValueError(f"profile_rank = {rank} is not a rank; legal: 0 to {self._world - 1}, all")
        return Wanted(steps, rank if isinstance(rank, int) else None)

    def request(self, wanted: Wanted) -> None:
        """Trace the steps from the next one on; a trace that is under way is ended first."""
        if wanted.rank in (None, self._rank):
            self._wanted = wanted

    @property
    def due(self) -> bool:
        """Whether a trace begins at the next step; one that is under way ends there."""
        return self._wanted is not None

    def start_step(self, step: int) -> None:
        if self._wanted:
            self.end()
            self._first, self._left, self._wanted = step, self._wanted.steps, None
            self._profile = torch.profiler.profile(activities=self._activities, record_shapes=True)
            self._profile.start()

    def end_step(self, step: int) -> None:
        if self._profile:
            self._left -= 1
            if not self._left:
                self.end(step)

    def end(self, step: int | None = None) -> None:
        """Write what was traced up to `step`, the last one if left out."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        profile.stop()
        last = self._first if step is None else step
        path = self._folder / f"step{self._first:06}-rank{self._rank}.json"
        self.wait()
        traced = Traced(path, self._first, last)
        self._thread = threading.Thread(target=self._write, args=(profile, traced), name="trace", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._thread:
            self._thread.join()
            self._thread = None

    def take_finished(self) -> list[Traced]:
        """What became of traces since the last call."""
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def _write(self, profile: Any, traced: Traced) -> None:
        why = ""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(traced.path))
        except (OSError, RuntimeError) as error:
            why = str(error).partition("\n")[0] or type(error).__name__
        self._finished.append(Traced(traced.path, traced.first, traced.last, why))


def action(name: str, about: str, do: Callable[[Any], None], ends: bool = False) -> Knob:
    """Something done once, in one way; `ends`: it ends the run."""
    return Knob(
        name, lambda _: Legal(choices=[True]), True, about, do, lambda _: None, action=True, ends=ends
    )
