"""Profiles steps with torch.profiler, on an operator's request."""

import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agents.protocol import Legal
from agents.rank.knob_board import Knob, Values

PROFILED_STEPS = (1, 2, 3, 5, 10, 20, 50)  # the trace of one step of a small model takes a few megabytes


@dataclass(frozen=True)
class TraceRequest:
    """The number of steps to trace, and the rank that traces them; None: every rank."""

    steps: int
    rank: int | None = 0


@dataclass(frozen=True)
class Traced:
    """The result of a trace on this rank."""

    path: Path
    first: int
    last: int
    why: str = ""  # the cause, if the trace failed

    def __str__(self) -> str:
        steps = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        if self.why:
            return f"the trace of {steps} was not written: {self.why}; training continues"
        return f"trace of {steps}: {self.path}"


class Profiler:
    """Traces steps of this rank into `folder`, in the format of chrome://tracing and Perfetto.

    No profiler code runs outside the requested steps. A background thread writes the trace.

    A trace must not start or stop while a collective runs: when the collective ends, gloo's thread writes the end time
    into the profiler's event, which `stop` has freed (torch 2.13: SIGSEGV in `onFunctionExit` below `Work::finish`, or
    silent memory corruption).
    """

    def __init__(self, folder: Path, rank: int, world: int, device: torch.device) -> None:
        self._folder, self._rank, self._world = folder, rank, world
        activity = torch.profiler.ProfilerActivity
        self._activities = [activity.CPU] + [activity.CUDA] * (device.type == "cuda")
        self._request: TraceRequest | None = None
        self._profile: torch.profiler.profile | None = None
        self._first, self._remaining = 0, 0
        self._thread: threading.Thread | None = None
        self._finished: deque[Traced] = deque()

    def knobs(self) -> list[Knob]:
        ranks = Legal(choices=["all"], low=0, high=self._world - 1)
        return [
            Knob(
                "profile",
                lambda _: Legal(choices=list(PROFILED_STEPS)),
                True,
                "trace this number of steps with torch.profiler, on rank 0 or profile_rank, into the run's folder",
                self.request,
                self._prepare,
                action=True,
            ),
            Knob(
                "profile_rank",
                lambda _: ranks,
                True,
                "the rank that profile traces; set together with profile; all = every rank",
                lambda _: None,
                self._prepare,
                action=True,
            ),
        ]

    def _prepare(self, values: Values) -> TraceRequest:
        steps, rank = values.get("profile"), values.get("profile_rank", 0)
        if not isinstance(steps, int):
            raise ValueError(
                "profile_rank selects the rank that profile traces; set both, such as profile=5 profile_rank=0"
            )
        if isinstance(rank, float):
            raise ValueError(f"profile_rank = {rank} is not a rank; legal: 0 to {self._world - 1}, all")
        return TraceRequest(steps, rank if isinstance(rank, int) else None)

    def request(self, request: TraceRequest) -> None:
        """Start a trace with the next step. A running trace is ended first."""
        if request.rank in (None, self._rank):
            self._request = request

    @property
    def due(self) -> bool:
        """Whether a trace starts with the next step. A running trace is ended before that step."""
        return self._request is not None

    def start_step(self, step: int) -> None:
        if self._request:
            self.end()
            self._first, self._remaining, self._request = step, self._request.steps, None
            self._profile = torch.profiler.profile(activities=self._activities, record_shapes=True)
            self._profile.start()

    def end_step(self, step: int) -> None:
        if self._profile:
            self._remaining -= 1
            if not self._remaining:
                self.end(step)

    def end(self, step: int | None = None) -> None:
        """End the running trace, if any, and write it. `step` is the last traced step (default: the first traced
        step)."""
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
        """Wait until no trace is being written."""
        if self._thread:
            self._thread.join()
            self._thread = None

    def take_finished(self) -> list[Traced]:
        """Results of the traces that finished since the last call."""
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def _write(self, profile: Any, traced: Traced) -> None:
        why = ""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(traced.path))
        except (OSError, RuntimeError) as error:
            why = str(error).partition("\n")[0] or type(error).__name__
        self._finished.append(Traced(traced.path, traced.first, traced.last, why))
