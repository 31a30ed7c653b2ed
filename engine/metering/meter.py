"""Measures each step of one rank: phases, collectives by axis, pipeline actions, routing counts.

*Bytes* are the bytes that a rank sends to other ranks under a bandwidth-optimal algorithm. With P ranks and n bytes in
total, a rank sends 2 (P-1)/P n in an all-reduce, (P-1)/P n in a reduce-scatter, (P-1) n_local in an all-gather, only
the rows for other ranks in an all-to-all, and n in a send (Thakur, Rabenseifner and Gropp 2005). These formulas are
evaluated in `engine/parallel/collectives.py`; the meter only adds up the results. `Lane.ms` is the time from the start
of a collective to its completion. `Lane.exposed_ms` is the part of this time in which the rank waits: all of it for a
blocking collective, less for a collective that overlaps with computation. Actions and collectives are timed with the
device's clock (`engine/metering/clocks.py`), phases with the host's wall time.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from engine.device import CPU
from engine.metering.axes import AXES
from engine.metering.clocks import CLOCKS, Clock, Mark

ActionKind = Literal["F", "B", "I", "W"]
"""Forward, full backward, and the two halves of a split backward pass: input gradients, weight gradients."""

ACTION_KINDS: tuple[ActionKind, ...] = get_args(ActionKind)
ACTION_NAMES: dict[ActionKind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "input gradients",
    "W": "weight gradients",
}

OperationCallback = Callable[[int, str], None]
"""Called with (step, operation) at the start of each operation, so that a killed rank's last operation is known."""


@dataclass
class Lane:
    """Bytes and duration of the communication over one axis in one step."""

    bytes: int = 0
    ms: float = 0.0
    exposed_ms: float = 0.0

    def add_exposed(self, seconds: float) -> None:
        """Add the time during which the rank waited for a collective."""
        self.ms += seconds * 1e3
        self.exposed_ms += seconds * 1e3

    def add_hidden(self, seconds: float) -> None:
        """Add time during which a collective overlapped with computation: it counts in `ms`, but not in
        `exposed_ms`."""
        self.ms += seconds * 1e3


@dataclass
class Span:
    """One pipeline action: the forward pass, the backward pass or a half of a split backward pass of a micro-batch on a
    stage. The times are in seconds since this rank started to run the step's pipeline schedule."""

    kind: ActionKind
    stage: int
    micro_batch: int
    start: float = 0.0
    end: float = 0.0


@dataclass
class Readings:
    """The measurements of one step of one rank."""

    layers: int
    experts: int
    device: torch.device = CPU
    lanes: dict[str, Lane] = field(default_factory=lambda: {axis: Lane() for axis in AXES})
    phases: dict[str, float] = field(default_factory=dict)  # seconds
    spans: list[Span] = field(default_factory=list)
    waited: float = 0.0  # seconds, between actions, in which the rank waited for a pipeline neighbour
    replica_bytes: int = 0  # bytes sent to sum gradients over the replicas
    replica_bytes_plain: int = 0  # bytes that this would take without compression
    a2a_to: dict[int, int] = field(default_factory=dict)  # global rank -> all-to-all bytes sent to it
    load: Tensor = field(init=False)  # [layer, expert], number of (token, expert) pairs of this rank's tokens
    dropped: Tensor = field(init=False)  # [layer], number of token-expert pairs dropped over capacity

    def __post_init__(self) -> None:
        self.load = torch.zeros(self.layers, self.experts, dtype=torch.int64, device=self.device)
        self.dropped = torch.zeros(self.layers, dtype=torch.int64, device=self.device)

    def settle(self) -> None:
        """Copy the routing counts (`load` and `dropped`) to the host. The copy synchronises with the device, so call
        this method when the host has just waited for the device anyway."""
        self.load, self.dropped = self.load.cpu(), self.dropped.cpu()

    def add_wait(self, seconds: float) -> None:
        """Add the time between two actions during which the rank waited for a pipeline neighbour."""
        self.waited += seconds
        self.lanes["pp"].add_exposed(seconds)

    @property
    def a2a_bytes(self) -> int:
        return sum(self.a2a_to.values())

    def busy(self, *kinds: ActionKind) -> float:
        """Seconds spent in actions; with `kinds`, only in actions of these kinds."""
        return sum(span.end - span.start for span in self.spans if not kinds or span.kind in kinds)

    @property
    def window(self) -> float:
        """Seconds from the start of the pipeline to the end of the last action of this rank."""
        return max((span.end for span in self.spans), default=0.0)


class Meter:
    """Adds up the measurements of a rank's step; `start_step` resets them. The meter measures every step and cannot be
    turned off."""

    def __init__(
        self,
        layers: int = 0,
        experts: int = 0,
        on_operation: OperationCallback | None = None,
        device: torch.device = CPU,
    ):
        self.layers, self.experts, self.device = layers, experts, device
        self.step = 0
        self.clock = CLOCKS[device.type]()
        self.readings = Readings(layers, experts, device)
        self._on_operation = on_operation
        self._operation = ("starting", time.monotonic())
        self._override = ""
        self.layer: int | None = None
        self._micro_batch: int | None = None
        self._opened: Mark = None
        self._idle_since: Mark = None  # start of the current wait for the pipeline, or None

    @property
    def operation(self) -> tuple[int, str, float]:
        """The current step, the current operation, and the value of time.monotonic() at the start of the operation. The
        pulse thread reads these values."""
        text, since = self._operation
        return self.step, self._override or text, since

    def set_operation(self, text: str) -> None:
        """Set the current operation to `text`. The pulses, which the agent sends once a second, report it."""
        self._operation = (text, time.monotonic())
        if self._on_operation:
            self._on_operation(self.step, text)

    def start_step(self, step: int) -> None:
        self.step = step
        self.clock.start_step()
        self.readings = Readings(self.layers, self.experts, self.device)

    def settle(self) -> None:
        """Copy the routing counts to the host, and process the time measurements that are complete. Call this method
        after the host has waited for the device."""
        self.readings.settle()
        self.clock.collect()

    @contextmanager
    def overriding_operation(self, text: str) -> Iterator[None]:
        """Context manager that keeps `operation` at `text`, even if a collective sets another operation. Used while the
        run is paused, because a paused run polls for commands with collectives, which would otherwise be shown as the
        current operation."""
        self._override = text
        yield
        self._override = ""

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context manager that discards the measurements made while it is open, so that the step's readings do not
        include them."""
        kept, self.readings = self.readings, Readings(self.layers, self.experts, self.device)
        try:
            yield
        finally:
            self.readings = kept

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.set_operation(name)
        start = time.perf_counter()
        yield
        phases = self.readings.phases
        phases[name] = phases.get(name, 0.0) + time.perf_counter() - start

    @contextmanager
    def in_layer(self, layer: int | None) -> Iterator[None]:
        outside, self.layer = self.layer, layer
        try:
            yield
        finally:  # torch stops a recomputed forward pass early by raising an exception
            self.layer = outside

    # --------------------------------------------------------------------------------------- collectives

    @contextmanager
    def collective(
        self,
        axis: str,
        kind: str,
        sent_bytes: int,
        to: Mapping[int, int] | None = None,
        clock: Clock | None = None,
    ) -> Iterator[None]:
        """Context manager that adds the bytes and the duration of one collective to the step's readings. `sent_bytes`:
        the bytes that this rank sends to other ranks. For an all-to-all, `to` maps each destination rank to the bytes
        sent to it. `clock` defaults to the device's clock."""
        clock = clock or self.clock
        text = f"{axis} {kind}"
        if self.layer is not None:
            text += f", layer {self.layer}"
        if self._micro_batch is not None:
            text += f", micro-batch {self._micro_batch}"
        before = self._operation[0]
        self.set_operation(text)
        was_idle = self._end_wait()  # time in the collective does not count as waiting for the pipeline
        start = clock.mark()
        yield
        lane = self.readings.lanes[axis]
        lane.bytes += sent_bytes
        clock.between(start, clock.mark(), lane.add_exposed)
        if was_idle:
            self._idle_since = self.clock.idle_mark()
        for peer, sent in (to or {}).items():
            self.readings.a2a_to[peer] = self.readings.a2a_to.get(peer, 0) + sent
        self.set_operation(before)

    def sent(self, axis: str, sent_bytes: int) -> None:
        """Add the bytes of a pipeline send. A send runs between two actions, so its duration counts as waiting time."""
        self.readings.lanes[axis].bytes += sent_bytes

    # ------------------------------------------------------------------------------------------ pipeline

    @contextmanager
    def pipeline(self) -> Iterator[None]:
        """Context manager for the pipeline of one step: the times of actions count from its start. From this start to
        the end of the last action, the rank is idle whenever it runs no action."""
        self._opened, self._idle_since = self.clock.mark(), self.clock.idle_mark()
        yield
        self._idle_since = None  # the time after the last action does not count as waiting

    @contextmanager
    def action(self, kind: ActionKind, stage: int, micro_batch: int) -> Iterator[None]:
        self._micro_batch = micro_batch
        self.set_operation(f"{ACTION_NAMES[kind]}, micro-batch {micro_batch}")
        self._end_wait()
        clock, span = self.clock, Span(kind, stage, micro_batch)
        clock.between(self._opened, clock.mark(), partial(setattr, span, "start"))
        yield
        clock.between(self._opened, clock.mark(), partial(setattr, span, "end"))
        self._idle_since = clock.idle_mark()
        self.readings.spans.append(span)
        self._micro_batch = None

    @contextmanager
    def action_goes_on(self) -> Iterator[None]:
        """Count work that the schedule runs after an action, such as the loss after the last stage's forward pass, as
        part of that action."""
        self.set_operation("loss")
        self._idle_since = None
        yield
        self._idle_since = self.clock.idle_mark()
        span = self.readings.spans[-1]
        self.clock.between(self._opened, self.clock.mark(), partial(setattr, span, "end"))

    def _end_wait(self) -> bool:
        """End the wait between two pipeline actions, if one is in progress; return whether one was."""
        if self._idle_since is None:
            return False
        self.clock.between(self._idle_since, self.clock.idle_mark(), self.readings.add_wait)
        self._idle_since = None
        return True

    # ------------------------------------------------------------------------------------------- routing

    def routed(self, layer: int, load_E: Tensor, dropped: Tensor) -> None:
        """Add the routing counts of one micro-batch in `layer`: the token-expert pairs of each expert, and the dropped
        pairs. A recomputed forward pass reuses the routing and does not call this method again."""
        self.readings.load[layer] += load_E
        self.readings.dropped[layer] += dropped
