"""Profiles steps with torch.profiler, on an operator's request."""

import json
import threading
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from agents.protocol import Legal, Value
from agents.rank.knob_board import Knob, Values
from agents.transport.open_files import replacing
from engine.config.grid import Grid

PROFILED_STEPS = (1, 2, 3, 5, 10, 20, 50)  # the trace of one step of a small model takes a few megabytes
MOST_STEPS = 2**53  # larger whole numbers are not exact in JSON
MOST_SLICES = 32  # coordinates of one axis on the knob board
METADATA = "cockpit"  # key of this rank's number and coordinates in a trace


def slices(grid: Grid) -> dict[str, frozenset[int]]:
    """The ranks at each coordinate of each axis, keyed by axis and coordinate, such as ``pp1``. Axes with only one
    coordinate or with more than `MOST_SLICES` are left out."""
    found: dict[tuple[str, int], set[int]] = {}
    for rank in range(grid.world):
        for axis, index in grid.shown(rank).items():
            if 1 < getattr(grid, axis) <= MOST_SLICES:
                found.setdefault((axis, index), set()).add(rank)
    return {f"{axis}{index}": frozenset(found[axis, index]) for axis, index in sorted(found)}


@dataclass(frozen=True)
class TraceRequest:
    """A request for a trace: the number of steps, the ranks to trace, and the first step (None: the next step)."""

    steps: int
    ranks: frozenset[int] = frozenset({0})
    first: int | None = None


@dataclass(frozen=True)
class Traced:
    """A finished trace of this rank, or the reason why it failed."""

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

    In the trace file, the key `METADATA` holds the rank and its coordinates, and each step is annotated as ``step N``.
    No profiler code runs outside the requested steps. A background thread writes the trace.

    A trace must not start or stop while a collective runs. Otherwise gloo's thread writes the end time of the
    collective into a profiler event that `stop` has already freed. With torch 2.13, the process then gets a SIGSEGV in
    `onFunctionExit` below `Work::finish`, or its memory is corrupted silently.
    """

    def __init__(self, folder: Path, rank: int, grid: Grid, device: torch.device) -> None:
        self._folder, self._rank, self._grid = folder, rank, grid
        self._slices = slices(grid)
        activity = torch.profiler.ProfilerActivity
        self._activities = [activity.CPU] + [activity.CUDA] * (device.type == "cuda")
        self._request: TraceRequest | None = None
        self._profile: torch.profiler.profile | None = None
        self._annotation: torch.profiler.record_function | None = None
        self._next = 0  # the step that follows the current one
        self._first, self._last, self._remaining = 0, 0, 0
        self._thread: threading.Thread | None = None
        self._finished: deque[Traced] = deque()

    def knobs(self) -> list[Knob]:
        ranks = Legal(choices=["all", *self._slices], low=0, high=self._grid.world - 1)
        return [
            Knob(
                "profile",
                lambda _: Legal(choices=list(PROFILED_STEPS)),
                True,
                "trace this number of steps with torch.profiler, into the run's folder",
                self.request,
                self._prepare,
                action=True,
            ),
            Knob(
                "profile_rank",
                lambda _: ranks,
                True,
                "the ranks that profile traces (default: rank 0); set together with profile",
                lambda _: None,
                self._prepare,
                action=True,
            ),
            Knob(
                "profile_from",
                lambda _: Legal(low=0, high=MOST_STEPS),
                True,
                "the first step that profile traces (default: the next step); set together with profile",
                lambda _: None,
                self._prepare,
                action=True,
            ),
        ]

    def _prepare(self, values: Values) -> TraceRequest:
        steps, rank, first = values.get("profile"), values.get("profile_rank", 0), values.get("profile_from")
        if not isinstance(steps, int):
            name = "profile_from" if "profile_rank" not in values else "profile_rank"
            raise ValueError(f"{name} has an effect only together with profile, such as profile=5 {name}=0")
        if isinstance(rank, float) or isinstance(first, float):
            name, number = ("profile_rank", rank) if isinstance(rank, float) else ("profile_from", first)
            raise ValueError(f"{name} = {number} is not a whole number")
        if isinstance(first, int) and first < self._next:
            raise ValueError(f"profile_from = {first} has passed; the next step is {self._next}")
        return TraceRequest(steps, self._ranks(rank), first if isinstance(first, int) else None)

    def _ranks(self, which: Value) -> frozenset[int]:
        if isinstance(which, str):
            return frozenset(range(self._grid.world)) if which == "all" else self._slices[which]
        return frozenset({int(which or 0)})

    def request(self, request: TraceRequest) -> None:
        """Start a trace at the requested step or, if no step is given, at the next step. A trace that is still running
        ends first."""
        if self._rank in request.ranks:
            self._request = request

    def due(self, step: int) -> bool:
        """Whether the requested trace starts at `step`. A trace that is still running then ends before this step."""
        request = self._request
        return request is not None and (request.first is None or step >= request.first)

    def start_step(self, step: int) -> None:
        self._next = step + 1
        if self._request and self.due(step):
            self.end()
            self._first, self._last, self._remaining = step, step, self._request.steps
            self._request = None
            self._profile = torch.profiler.profile(activities=self._activities, record_shapes=True)
            self._profile.start()
            place = {"rank": self._rank, "coords": self._grid.shown(self._rank)}
            self._profile.add_metadata_json(METADATA, json.dumps(place))
        if self._profile:
            self._annotation = torch.profiler.record_function(f"step {step}")
            self._annotation.__enter__()  # type: ignore[no-untyped-call]  # torch has no types for it

    def end_step(self, step: int) -> None:
        if self._annotation:
            self._annotation.__exit__(None, None, None)
            self._annotation = None
        if self._profile:
            self._last = step
            self._remaining -= 1
            if not self._remaining:
                self.end()

    def end(self) -> None:
        """End the running trace, if any, and start writing it in a thread."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        profile.stop()
        path = self._folder / f"step{self._first:06}-rank{self._rank}.json"
        self.wait()
        traced = Traced(path, self._first, self._last)
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
            with replacing(traced.path) as unfinished:
                profile.export_chrome_trace(str(unfinished))
        except (OSError, RuntimeError) as error:
            why = str(error).partition("\n")[0] or type(error).__name__
        self._finished.append(replace(traced, why=why))
